"""The repository as the lint rules see it: our text files, C++ without comments, include lines."""

import pathlib
import re
import sys
from dataclasses import dataclass
from typing import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
CXX_SUFFIXES = {".hpp", ".cpp", ".h", ".c", ".cuh"}
TEXT_SUFFIXES = CXX_SUFFIXES | {".py", ".md", ".cmake", ".txt", ".json", ".sh", ""}
SKIPPED_FOLDERS = {"build", "data", "__pycache__"}


@dataclass(frozen=True)
class Finding:
    """One broken rule; prints as compilers do, so that editors can jump."""

    path: pathlib.PurePath
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Source:
    """A file: `path` relative to the repository, `text` as it stands."""

    path: pathlib.PurePosixPath
    text: str

    @property
    def is_cxx(self) -> bool:
        return self.path.suffix in CXX_SUFFIXES

    @property
    def is_header(self) -> bool:
        return self.path.suffix in {".hpp", ".h", ".cuh"}

    def includes(self) -> Iterator[tuple[int, str, bool]]:
        """(line number, included name, is it in angle brackets)."""
        for number, line in enumerate(self.text.splitlines(), 1):
            if match := re.match(r'\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', line):
                yield number, match[1] or match[2], match[1] is not None

    def code_lines(self) -> Iterator[tuple[int, str]]:
        """Lines without comments and without the contents of string literals."""
        yield from enumerate(strip_comments_and_strings(self.text).splitlines(), 1)


def strip_comments_and_strings(text: str) -> str:
    pattern = re.compile(
        r'R"(?P<tag>[^\s()]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL
    )

    def blank(match: re.Match[str]) -> str:
        lines = "\n" * match[0].count("\n")
        return lines if match[0].startswith("/") else f'""{lines}'

    return pattern.sub(blank, text)


def is_ours(relative: pathlib.Path) -> bool:
    """Not a build, not data, not a tool's hidden cache (.ci is ours)."""
    is_hidden = any(part.startswith(".") and part != ".ci" for part in relative.parts)
    return not is_hidden and not SKIPPED_FOLDERS & set(relative.parts) and relative.suffix in TEXT_SUFFIXES


def sources(root: pathlib.Path = ROOT) -> list[Source]:
    paths = sorted(path for path in root.rglob("*") if is_ours(path.relative_to(root)) and path.is_file())
    return [
        Source(pathlib.PurePosixPath(path.relative_to(root).as_posix()), path.read_text("utf-8", "replace"))
        for path in paths
    ]


Rule = Callable[[list[Source]], list[Finding]]


def main(*rules: Rule) -> None:
    """Applies the rules to the repository; prints findings and exits 1 where there are any."""
    files = sources()
    findings = [finding for rule in rules for finding in rule(files)]
    for finding in findings:
        print(finding)
    print(f"{len(files)} files, {len(findings)} findings")
    sys.exit(1 if findings else 0)
