"""Each function of src/cuda/device/ptx has a twin in src/cuda/emulator/device/ptx: same file, template and parameters (a twin may add a Site)."""

import re

from tree import Finding, Source, main

DEVICE = "src/cuda/device/ptx/"
EMULATED = "src/cuda/emulator/device/ptx/"
DECLARATION = re.compile(
    r"(?:template <(?P<template>[^{};]*?)>\s*)?FOVEA_DEVICE (?:constexpr )?(?P<result>[\w:]+) (?P<name>\w+)\((?P<parameters>[^{}]*?)\) \{"
)


def types_of(parameters: str) -> str:
    """Without names, which a twin that has no use for a parameter leaves out."""
    one_line = re.sub(r"\(&\w+\)", "(&)", " ".join(parameters.split()))
    return ", ".join(re.sub(r"(?<=[\s&*])\w+$", "", parameter.strip()).strip() for parameter in one_line.split(","))


def declarations(source: Source) -> dict[str, tuple[int, str]]:
    """name -> (line, all that a caller sees), without the Site that a twin adds."""
    code = "\n".join(line for _, line in source.code_lines())
    found = {}
    for match in DECLARATION.finditer(code):
        parameters = re.sub(r",?\s*Site site = Site::here\(\)", "", match["parameters"])
        seen = f"<{match['template'] or ''}> {match['result']} ({types_of(parameters)})"
        line = code.count("\n", 0, match.start("name")) + 1
        found[match["name"]] = (line, " ".join(seen.split()))
    return found


def every_instruction_has_a_twin(files: list[Source]) -> list[Finding]:
    texts = {source.path.as_posix(): source for source in files if source.path.suffix == ".cuh"}
    findings = []
    for path, source in texts.items():
        name = path.removeprefix(DEVICE)
        if not path.startswith(DEVICE) or "/" in name:
            continue
        twin = texts.get(EMULATED + name)
        twins = declarations(twin) if twin else {}
        for function, (line, seen) in declarations(source).items():
            if function not in twins:
                findings.append(Finding(source.path, line, f"{function} has no twin in {EMULATED}{name}"))
            elif twins[function][1] != seen:
                findings.append(Finding(twin.path, twins[function][0], f"{function} is {twins[function][1]}; the device has {seen}"))
    return findings


if __name__ == "__main__":
    main(every_instruction_has_a_twin)
