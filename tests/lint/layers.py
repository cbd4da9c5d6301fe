"""Includes go left: a room knows the rooms before it; public headers know public headers and the standard library."""

import re

from tree import Finding, Source, main

ORDER = ["core", "expr", "quant", "problem", "mask", "backend", "plan", "parallel", "nn", "ffi", "tools"]
BACKENDS = {"reference", "cpu", "cuda"}


def rank(room: str) -> int:
    return ORDER.index("backend" if room in BACKENDS else room)


def is_known(room: str) -> bool:
    return room in ORDER or room in BACKENDS


def room_of(source: Source) -> str | None:
    """The room that a file stands in; None outside the rooms (tests and examples may know everything)."""
    parts = source.path.parts
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    return "tools" if parts[0] == "tools" else None


def may_include(reader: str, room: str) -> bool:
    if reader == room:
        return True
    return rank(room) < rank(reader)


def rooms_know_the_rooms_before_them(files: list[Source]) -> list[Finding]:
    findings = []
    for source in files:
        reader = room_of(source)
        if not source.is_cxx or reader is None:
            continue
        if not is_known(reader):
            findings.append(Finding(source.path, 1, f"room {reader} has no place in the order of tests/lint/layers.py"))
            continue
        for line, name, is_angle in source.includes():
            room = name.split("/")[0]
            if is_angle or "/" not in name or not is_known(room):
                continue
            if not may_include(reader, room):
                findings.append(Finding(source.path, line, f"{reader} must not know {room}: includes go left"))
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


if __name__ == "__main__":
    main(rooms_know_the_rooms_before_them, public_headers_stay_public)
