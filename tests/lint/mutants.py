"""Every mutant of tests/mutants.toml can be planted: its file, its line and its units are there, and no two have one name."""

import collections
import pathlib
import sys

from tree import Finding, ROOT, Source, main

sys.path.insert(0, str(ROOT / "tests"))

from mutate import MutantError, mutated, read_mutants

LIST = pathlib.PurePosixPath("tests/mutants.toml")


def findings_of(text: str, files: list[Source]) -> list[Finding]:
    texts = {source.path.as_posix(): source.text for source in files}
    mutants = read_mutants(text)
    line_of = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("name = "):
            line_of[line.split('"')[1]] = number
    findings = []
    for name, count in collections.Counter(mutant.name for mutant in mutants).items():
        if count > 1:
            findings.append(Finding(LIST, line_of[name], f"{count} mutants are called {name}"))
    for mutant in mutants:
        missing = [path for path in (mutant.file, *mutant.units) if path not in texts]
        findings += [Finding(LIST, line_of[mutant.name], f"there is no {path}") for path in missing]
        if missing:
            continue
        try:
            mutated(mutant, texts[mutant.file])
        except MutantError as error:
            findings.append(Finding(LIST, line_of[mutant.name], str(error)))
    return findings


def mutants_can_be_planted(files: list[Source]) -> list[Finding]:
    return findings_of((ROOT / LIST).read_text(), files)


if __name__ == "__main__":
    main(mutants_can_be_planted)
