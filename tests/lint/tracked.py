"""What git tracks is the project: no tool's hidden cache, no large file. A commit of everything in a folder brings both, for good."""

import pathlib
import subprocess

from tree import ROOT, Finding, Source, main

HIDDEN_FILES_OF_OURS = {".clang-format", ".clang-tidy", ".gitignore"}
MOST_BYTES = 600_000


def findings_of(tracked: dict[str, int]) -> list[Finding]:
    """`tracked`: the size in bytes of each path."""
    findings = []
    for name, num_bytes in sorted(tracked.items()):
        path = pathlib.PurePosixPath(name)
        is_hidden = any(part.startswith(".") for part in path.parts)
        if is_hidden and path.parts[0] != ".ci" and name not in HIDDEN_FILES_OF_OURS:
            findings.append(Finding(path, 1, "hidden files are of tools: git rm --cached, and a line in .gitignore"))
        if num_bytes > MOST_BYTES:
            findings.append(Finding(path, 1, f"{num_bytes} bytes; a tracked file has at most {MOST_BYTES}"))
    return findings


def only_the_project_is_tracked(_: list[Source]) -> list[Finding]:
    if not (ROOT / ".git").exists():
        return []  # a tree from an archive
    listing = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    paths = [name for name in listing.split("\0") if name and (ROOT / name).exists()]
    return findings_of({name: (ROOT / name).stat().st_size for name in paths})


if __name__ == "__main__":
    main(only_the_project_is_tracked)
