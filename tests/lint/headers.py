"""Each header opens with a comment, guards itself and compiles alone; fovea.h also as C11.

What a source of the same name includes before all else, the build has compiled alone: only the others are compiled here.

usage: headers.py [--cxx COMPILER] [--cc COMPILER] [--system-include DIR] [--public-only]
"""

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys

from tree import ROOT, Finding, Source, sources


def opens_with_a_comment(files: list[Source]) -> list[Finding]:
    return [
        Finding(source.path, 1, "a header's first line is a comment: what lives here, what to read next")
        for source in files
        if source.is_header and not source.text.startswith(("// ", "/* "))
    ]


def is_standalone(source: Source) -> bool:
    """*-inl.hpp are parts of one translation unit, compiled once per vector target; *.cuh are NVRTC's (tests/compile/cuda)."""
    is_host_text = source.path.parts[0] in ("include", "src") and source.path.suffix != ".cuh"
    return source.is_header and is_host_text and not source.path.stem.endswith("-inl")


def is_first_in_its_source(header: Source, files: dict[pathlib.PurePosixPath, Source]) -> bool:
    source = files.get(header.path.with_suffix(".cpp"))
    _, first, _ = next(source.includes(), (0, "", False)) if source else (0, "", False)
    return bool(first) and header.path.match(first)


def compile_command(source: Source, language: str, args: argparse.Namespace) -> list[str]:
    compiler = [args.cc, "-std=c11", "-pedantic-errors"] if language == "c" else [args.cxx, "-std=c++20"]
    folders = ["-Iinclude"] if source.path.parts[0] == "include" else ["-Iinclude", "-Isrc", "-Isrc/cuda/device"]
    system = ["-isystem", args.system_include] if args.system_include else []
    # Included, not given: as the main file, `#pragma once` would warn.
    return [*compiler, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *folders, *system, "-x", language, "-include",
            source.path.as_posix(), "/dev/null"]


def compiles_alone(job: tuple[Source, str], args: argparse.Namespace) -> list[Finding]:
    source, language = job
    done = subprocess.run(compile_command(source, language, args), cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
    return [Finding(source.path, 1, f"does not compile alone as {language}: {first}")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--system-include", help="where Highway's headers are, if not where the compiler looks")
    parser.add_argument("--public-only", action="store_true")
    args = parser.parse_args()

    files = sources()
    findings = opens_with_a_comment(files)
    by_path = {source.path: source for source in files}
    headers = [source for source in files if is_standalone(source) and not is_first_in_its_source(source, by_path)]
    if args.public_only:
        headers = [source for source in headers if source.path.parts[0] == "include"]
    jobs = [(source, "c++") for source in headers]
    jobs += [(source, "c") for source in headers if source.path.as_posix() == "include/fovea/fovea.h"]
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for found in pool.map(lambda job: compiles_alone(job, args), jobs):
            findings += found
    for finding in findings:
        print(finding)
    print(f"{len(jobs)} headers compiled, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
