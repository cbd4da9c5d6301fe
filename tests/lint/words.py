"""Words that stand in one place or nowhere: asm, getenv, printing and ending the process, leftovers, absolute paths."""

import re

from tree import Finding, Source, main

ENVIRONMENT_READER = "src/core/env.cpp"
VERBOSE_WRITER = "src/core/verbose.cpp"
PRODUCT_FOLDERS = {"include", "src", "tools", "bench", "examples"}
LIBRARY_FOLDERS = {"include", "src"}


def find_in_code(source: Source, pattern: str, message: str) -> list[Finding]:
    return [
        Finding(source.path, line, message.format(match[0].strip()))
        for line, code in source.code_lines()
        if (match := re.search(pattern, code))
    ]


def assembly_stands_in_ptx_only(files: list[Source]) -> list[Finding]:
    return [
        finding
        for source in files
        if source.is_cxx and not source.path.as_posix().startswith("src/cuda/device/ptx/")
        for finding in find_in_code(source, r"\b(__)?asm(__)?\b\s*(volatile\b|__volatile__\b)?\s*\(", "{} outside device/ptx")
    ]


def environment_is_read_in_one_place(files: list[Source]) -> list[Finding]:
    return [
        finding
        for source in files
        if source.is_cxx and source.path.parts[0] in PRODUCT_FOLDERS and source.path.as_posix() != ENVIRONMENT_READER
        for finding in find_in_code(source, r"\b(secure_)?getenv\b|\benviron\b", f"{{}} outside {ENVIRONMENT_READER}")
    ]


def library_is_silent(files: list[Source]) -> list[Finding]:
    """The library never prints, aborts or exits: errors are thrown, texts are returned. FOVEA_VERBOSE alone asks for lines."""
    pattern = r"\b(STD(OUT|ERR)_FILENO|std(out|err))\b|\bstd::(cout|cerr|clog|terminate|abort|exit|quick_exit)\b|(?<![\w:.>])(f?printf|f?puts|abort|exit|_exit|assert)\s*\("
    return [
        finding
        for source in files
        if source.is_cxx and source.path.parts[0] in LIBRARY_FOLDERS and source.path.as_posix() != VERBOSE_WRITER
        for finding in find_in_code(source, pattern, "{} in the library, which never prints, aborts or exits")
    ]


def nothing_is_left_over(files: list[Source]) -> list[Finding]:
    findings = []
    for source in files:
        if source.path.parts[:2] == ("tests", "lint"):
            continue
        for number, line in enumerate(source.text.splitlines(), 1):
            if match := re.search(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b", line):
                findings.append(Finding(source.path, number, f"{match[0]}: do it now, or leave it to the issue list"))
            if match := re.search(r"(?<![\w.$}])/(home|root|work|tmp|opt)/[\w.]", line):
                findings.append(Finding(source.path, number, f"{match[0]}... is a path of one machine"))
    return findings


COMMENT_WIDTH = 120


def comments_end_in_time(files: list[Source]) -> list[Finding]:
    """Lines that are comments alone; clang-format sees to code and leaves them as they are."""
    return [
        Finding(source.path, number, f"a comment of {len(line)} columns; expected at most {COMMENT_WIDTH}")
        for source in files
        if source.is_cxx
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(line) > COMMENT_WIDTH and re.match(r"\s*(//|/?\*)", line)
    ]


if __name__ == "__main__":
    main(assembly_stands_in_ptx_only, environment_is_read_in_one_place, library_is_silent, nothing_is_left_over, comments_end_in_time)
