"""Every function of src/cuda/device/ptx has a twin of the same signature in src/cuda/emulator/device/ptx, less the Site that the twin
takes last; so have the headers of device/common that the emulator replaces. What src/cuda/amd/ptx has of them is of the same
signature, and what it has beyond them has an emulated twin.

usage: twins_test.py ROOT
"""

import pathlib
import re
import sys

SITE = re.compile(r",?\s*Site site = Site::here\(\)")


def parameter_list(text: str, opening: int) -> str:
    """What stands between the parenthesis at `opening` and the one that closes it."""
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return text[opening + 1 : at]
    raise ValueError("a parenthesis is not closed")


def type_of(parameter: str) -> str:
    """`const T (&d)[4]` as `const T (&)[4]`, `std::uint32_t count` as `std::uint32_t`."""
    parameter = " ".join(parameter.split())
    array = re.fullmatch(r"(.*)\(&\s*\w*\)(\[.*\])", parameter)
    if array:
        return f"{array[1].strip()} (&){array[2]}"
    return re.sub(r"(?<=[\w>&*]) \w+$", "", parameter) if " " in parameter else parameter


def split(parameters: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += {"<": 1, "(": 1, "[": 1, ">": -1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def functions(path: pathlib.Path) -> set[str]:
    text = re.sub(r"//[^\n]*", "", path.read_text())
    found = set()
    for match in re.finditer(r"FOVEA_DEVICE\s+((?:constexpr\s+)?[\w:<>*& ]+?)\s+(\w+)\(", text):
        if text[: match.start()].endswith("#define "):
            continue
        parameters = SITE.sub("", parameter_list(text, match.end() - 1))
        types = ", ".join(type_of(part) for part in split(parameters))
        found.add(f"{' '.join(match[1].split())} {match[2]}({types})")
    return found


def missing_twins(root: pathlib.Path) -> list[str]:
    real, emulated = root / "src/cuda/device", root / "src/cuda/emulator/device"
    complaints = []
    headers = sorted((real / "ptx").rglob("*.cuh")) + [real / p.relative_to(emulated) for p in sorted(emulated.glob("common/*.cuh"))]
    for path in headers:
        name = path.relative_to(real)
        if name.name.endswith("_registers.cuh"):
            continue  # operands of asm
        twin = emulated / name
        if not path.exists() or not twin.exists():
            complaints.append(f"{name}: has no twin")
            continue
        complaints += [f"{name}: no twin of {function}" for function in sorted(functions(path) - functions(twin))]
    return complaints


def name_of(function: str) -> str:
    return function.split("(")[0].split()[-1]


def functions_if_any(path: pathlib.Path) -> set[str]:
    return functions(path) if path.exists() else set()


def strange_twins(root: pathlib.Path) -> list[str]:
    """Functions of AMD's that callers of the real ones could not call; those that only AMD has, and the emulator has not."""
    complaints = []
    for twin in sorted((root / "src/cuda/amd/ptx").glob("*.cuh")):
        real = functions_if_any(root / "src/cuda/device/ptx" / twin.name)
        emulated = functions_if_any(root / "src/cuda/emulator/device/ptx" / twin.name)
        known = {name_of(function) for function in real}
        new = functions(twin) - real
        own = {function for function in new if name_of(function) not in known}
        complaints += [f"amd/ptx/{twin.name}: no emulated twin of {function}" for function in sorted(own - emulated)]
        strange = new - own
        complaints += [f"amd/ptx/{twin.name}: not as in device/ptx: {function}" for function in sorted(strange)]
    return complaints


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    complaints = missing_twins(root) + strange_twins(root)
    print("\n".join(complaints))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
