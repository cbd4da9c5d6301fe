"""Includes go left: a module knows the modules before it; public headers know public headers and the standard library; device text knows
itself, host code reads nothing of it but what is shared, and only tests read the emulator."""

import re

from tree import Finding, Source, main

ORDER = ["core", "expr", "quant", "problem", "mask", "backend", "plan", "parallel", "nn", "ffi", "tools"]
BACKENDS = {"reference", "cpu", "cuda"}
DEVICE = "src/cuda/device/"
SHARED = DEVICE + "shared/"
# Device text of AMD's GPUs, ahead of the other on the include path.
AMD = "src/cuda/amd/"
# Kernels of the command's own, which are no part of the library: they include its text and each other.
TOOLS, TOOL_TEXT = "tools/", "tools/rates/"
EMULATOR = "src/cuda/emulator/"


def rank(module: str) -> int:
    return ORDER.index("backend" if module in BACKENDS else module)


def is_known(module: str) -> bool:
    return module in ORDER or module in BACKENDS


def room_of(source: Source) -> str | None:
    """The module that a file stands in; None outside the modules (tests and examples may know everything)."""
    parts = source.path.parts
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    return "tools" if parts[0] == "tools" else None


def may_include(reader: str, module: str) -> bool:
    if reader == module:
        return True
    return rank(module) < rank(reader)


def modules_know_the_modules_before_them(files: list[Source]) -> list[Finding]:
    findings = []
    for source in files:
        reader = room_of(source)
        if not source.is_cxx or reader is None:
            continue
        if not is_known(reader):
            findings.append(Finding(source.path, 1, f"module {reader} has no place in the order of tests/lint/layers.py"))
            continue
        for line, name, is_angle in source.includes():
            module = name.split("/")[0]
            if is_angle or "/" not in name or not is_known(module):
                continue
            if not may_include(reader, module):
                findings.append(Finding(source.path, line, f"{reader} must not know {module}: includes go left"))
    return findings


def public_headers_stay_public(files: list[Source]) -> list[Finding]:
    findings = []
    for source in files:
        if source.path.parts[0] != "include":
            continue
        for line, name, is_angle in source.includes():
            is_standard = is_angle and re.fullmatch(r"[a-z_]+(\.h)?", name) and "intrin" not in name
            if not is_standard and not (not is_angle and name.startswith("fovea/")):
                findings.append(Finding(source.path, line, f"public header includes {name}: only public or standard headers"))
    return findings


def names_device_text(name: str) -> bool:
    """As device text names itself: by folders of src/cuda/device."""
    return re.match(r"(ptx|tile|common|shared|sm\d+|cdna)/", name) is not None


def device_text_includes_itself(files: list[Source]) -> list[Finding]:
    """No toolkit, no system: NVRTC finds what the library embeds. The shared structs name the host's <cst...> for the host."""
    findings = []
    there = {source.path.as_posix() for source in files}
    for source in files:
        path = source.path.as_posix()
        if not source.is_cxx or not path.startswith((DEVICE, AMD, TOOL_TEXT)):
            continue
        for line, name, is_angle in source.includes():
            is_for_host = path.startswith(SHARED) and is_angle and re.fullmatch(r"cst[a-z]+", name)
            is_of_tool = path.startswith(TOOL_TEXT) and (TOOLS + name).startswith(TOOL_TEXT) and TOOLS + name in there
            is_embedded = not is_angle and (DEVICE + name in there or AMD + name in there or is_of_tool)
            is_shared = path.startswith(SHARED) or (path.startswith(TOOL_TEXT) and path.endswith(".h"))
            is_door = not is_shared or name.startswith("shared/")
            if not is_for_host and not (is_embedded and is_door):
                findings.append(Finding(source.path, line, f"device text includes {name}: only what it embeds, from src/cuda/device"))
    return findings


def host_reads_shared_structs_only(files: list[Source]) -> list[Finding]:
    findings = []
    for source in files:
        path = source.path.as_posix()
        is_host = source.path.parts[0] in {"include", "src", "tools", "bench", "examples"}
        if not source.is_cxx or not is_host or path.startswith((DEVICE, AMD, EMULATOR, TOOL_TEXT)):
            continue
        for line, name, is_angle in source.includes():
            is_device = name.startswith("cuda/device/") and not name.startswith("cuda/device/shared/") or name.endswith(".cuh")
            if is_device or (not is_angle and names_device_text(name)):
                findings.append(Finding(source.path, line, f"host code includes {name}: only cuda/device/shared/ is for both"))
            if name.startswith("cuda/emulator/"):
                findings.append(Finding(source.path, line, f"{name} is the tests': nothing that ships reads the emulator"))
    return findings


if __name__ == "__main__":
    main(
        modules_know_the_modules_before_them,
        public_headers_stay_public,
        device_text_includes_itself,
        host_reads_shared_structs_only,
    )
