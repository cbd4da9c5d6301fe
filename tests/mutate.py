#!/usr/bin/env python3
"""Plants one fault after another in the product's code and says which the tests catch: each of tests/mutants.toml must be caught.

    scripts/dev mutate [NAME...]     all, or those whose names contain one of the arguments
    scripts/dev mutate --list

The working tree is not touched. A mutated file is compiled alone, with the command of the release build, and its object is linked
before the build's libraries, from which the linker then takes everything but it. So a mutant costs one compilation, one link and
the tests that must see it.

The fields of a mutant:
  name, breaks   what it is called, and what it would break
  file           what is mutated. A header is compiled as part of `units`: files that include it, from tests too. Device text
                 without units is planted in the strings that the library gives to the kernel compiler
  flags          optional: more flags for the compiler; vector code compiles in seconds with -DHWY_COMPILE_ONLY_STATIC, for the
                 portable target alone
  after          optional: a line of the file. `line` is looked for behind its first occurrence, and need not be the only one
  line           a whole line of the file, but for the spaces around it; one that ends in "..." is the beginning of a line
  becomes        what stands there instead; it may have several lines
  program        the test program, a target of the build
  filter         its tests that fail: a filter of GoogleTest
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests/mutants.toml"
TIMEOUT_S = 300
DEVICE_TEXT = "src/cuda/device/"
EMBEDDED = "embedded/device_text.cpp"  # of a build


class MutantError(Exception):
    """The mutant itself is wrong: its line is gone, it does not compile, its tests fail without it."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    breaks: str
    file: str
    line: str
    becomes: str
    program: str
    filter: str
    after: str = ""
    units: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


def read_mutants(text: str) -> list[Mutant]:
    entries = tomllib.loads(text)["mutant"]
    return [
        Mutant(**{**entry, "units": tuple(entry.get("units", ())), "flags": tuple(entry.get("flags", ()))})
        for entry in entries
    ]


def embedded_with(text: str, plain: str, fault: str) -> str:
    """The generated source with the fault, and with another digest: kernels on the disk are others'."""
    if plain not in text:
        raise MutantError(f"{EMBEDDED} has another text")
    digest = hashlib.sha256(fault.encode()).digest()[0]
    return re.sub(r"(text\{kFiles, \{)0x..", rf"\g<1>0x{digest:02x}", text.replace(plain, fault))


def is_line(wanted: str, line: str) -> bool:
    wanted, line = wanted.strip(), line.strip()
    return line.startswith(wanted[:-3]) if wanted.endswith("...") else line == wanted


def mutated(mutant: Mutant, text: str) -> str:
    """The text with its fault. Raises MutantError where the line is not there, or is there twice."""
    lines = text.splitlines()
    begin = 0
    if mutant.after:
        begin = next((i + 1 for i, line in enumerate(lines) if is_line(mutant.after, line)), 0)
        if begin == 0:
            raise MutantError(f"{mutant.file} has no line '{mutant.after}'")
    found = [i for i in range(begin, len(lines)) if is_line(mutant.line, lines[i])]
    if not found:
        raise MutantError(f"{mutant.file} has no line '{mutant.line}'")
    if len(found) > 1 and not mutant.after:
        raise MutantError(f"{mutant.file} has {len(found)} lines '{mutant.line}'")
    if lines[found[0]].strip() == mutant.becomes.strip():
        raise MutantError(f"{mutant.name} changes nothing")
    return "\n".join(lines[: found[0]] + [mutant.becomes] + lines[found[0] + 1 :]) + "\n"


class Build:
    """The release build: how a file was compiled, how a program was linked."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        commands = json.loads((folder / "compile_commands.json").read_text())
        self.compilations = {os.path.relpath(each["file"], ROOT): each for each in commands}

    def compilation(self, unit: str) -> tuple[list[str], str]:
        """(arguments without source and output, the object's path as link commands name it)."""
        if unit not in self.compilations:
            raise MutantError(f"the build compiles no {unit}")
        arguments = shlex.split(self.compilations[unit]["command"])
        output = arguments.index("-o")
        return arguments[:output], arguments[output + 1]

    def link(self, program: str) -> list[str]:
        text = subprocess.run(
            ["ninja", "-C", self.folder, "-t", "commands", program], capture_output=True, text=True, check=True
        ).stdout
        return shlex.split(text.strip().splitlines()[-1].removeprefix(": &&").removesuffix("&& :"))

    def path_of(self, program: str) -> pathlib.Path:
        link = self.link(program)
        return self.folder / link[link.index("-o") + 1]


def run(arguments: list[str], folder: pathlib.Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **options
    )


def compile_mutant(build: Build, mutant: Mutant, scratch: pathlib.Path) -> dict[str, str]:
    """Objects with the fault, by the paths of those without it."""
    path = scratch / pathlib.PurePath(mutant.file)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = (ROOT / mutant.file).read_text()
    path.write_text(mutated(mutant, plain))
    units = mutant.units or (mutant.file,)
    if not mutant.units and mutant.file.startswith(DEVICE_TEXT):
        embedded = build.folder / EMBEDDED
        units = (os.path.relpath(embedded, ROOT),)
        text = embedded_with(embedded.read_text(), plain, path.read_text())
        path = scratch / "device_text.cpp"
        path.write_text(text)
    objects = {}
    for number, unit in enumerate(units):
        arguments, planned = build.compilation(unit)
        source = ROOT / unit if unit in mutant.units else path
        # The mutated header is found before the one it stands for, under whichever folder it is included from.
        folders = [scratch / name for name in ("src", "include", "tests", "src/cuda/device")]
        includes = [f"-I{folder}" for folder in folders] + [f"-I{(ROOT / unit).parent}"]
        made = scratch / f"{number}.o"
        result = run(
            [arguments[0], *includes, *arguments[1:], "-O1", "-w", *mutant.flags, "-o", str(made), "-c", str(source)],
            build.folder,
        )
        if result.returncode != 0:
            raise MutantError("does not compile:\n" + result.stdout)
        objects[planned] = str(made)
    return objects


def link_mutant(build: Build, mutant: Mutant, objects: dict[str, str], scratch: pathlib.Path) -> pathlib.Path:
    link = build.link(mutant.program)
    output = link.index("-o") + 1
    link[output] = str(scratch / "program")
    linked = [objects.get(argument, argument) for argument in link]
    first = [made for planned, made in objects.items() if planned not in link]
    result = run(linked[: output + 1] + first + linked[output + 1 :], build.folder)
    if result.returncode != 0:
        raise MutantError("does not link:\n" + result.stdout)
    return scratch / "program"


def run_tests(program: pathlib.Path, mutant: Mutant, folder: pathlib.Path) -> tuple[bool, str]:
    """(did they pass, what was seen)."""
    environment = {**os.environ, "RC_PARAMS": "seed=1", "FOVEA_TEST_LONG": "3", "GTEST_BRIEF": "1"}
    arguments = [str(program), f"--gtest_filter={mutant.filter}", "--gtest_fail_fast"]
    try:
        result = run(arguments, folder, env=environment, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False, "hangs"
    if result.returncode == 0:
        if "[  PASSED  ] 0 tests" in result.stdout:
            raise MutantError(f"{mutant.program} runs no test of the filter {mutant.filter}")
        return True, ""
    if result.returncode < 0:
        return False, f"dies of signal {-result.returncode}"
    failed = [line for line in result.stdout.splitlines() if line.startswith("[  FAILED  ] ")]
    if not failed:
        return False, "fails"
    return False, failed[0].removeprefix("[  FAILED  ] ").split(" (")[0].split(", where")[0]


def try_mutant(build: Build, mutant: Mutant) -> tuple[str, str]:
    """(verdict, what was seen): caught, SURVIVED or ERROR."""
    with tempfile.TemporaryDirectory(prefix="fovea_mutant_") as name:
        scratch = pathlib.Path(name)
        try:
            objects = compile_mutant(build, mutant, scratch)
            passed, seen = run_tests(link_mutant(build, mutant, objects, scratch), mutant, build.folder)
        except MutantError as error:
            return "ERROR", str(error)
    return ("SURVIVED", mutant.breaks) if passed else ("caught", seen)


def check_without_mutants(build: Build, mutants: list[Mutant]) -> None:
    """The tests that are to fail pass on the code as it is; else they prove nothing."""
    filters: dict[str, list[str]] = {}
    for mutant in mutants:
        if mutant.filter not in filters.setdefault(mutant.program, []):
            filters[mutant.program].append(mutant.filter)
    for program, parts in filters.items():
        whole = dataclasses.replace(mutants[0], program=program, filter=":".join(parts))
        passed, seen = run_tests(build.path_of(program), whole, build.folder)
        if not passed:
            raise MutantError(f"without any mutant, {program}: {seen}")
        print(f"mutate: {program} passes without mutants", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants faults in the code; the tests must catch each.")
    parser.add_argument("names", nargs="*", help="only mutants whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the mutants and what they would break")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release", help="a build that is up to date")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    options = parser.parse_args()
    mutants = read_mutants(MUTANTS.read_text())
    if options.names:
        mutants = [mutant for mutant in mutants if any(name in mutant.name for name in options.names)]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:40} {mutant.file}: {mutant.breaks}")
        return 0
    if not mutants:
        print("no mutant has such a name", file=sys.stderr)
        return 2
    build = Build(options.build)
    programs = sorted({mutant.program for mutant in mutants})
    if subprocess.run(["cmake", "--build", build.folder, "--parallel", str(options.jobs), "--target", *programs],
                      stdout=subprocess.DEVNULL).returncode != 0:
        print("mutate: the code without mutants does not build", file=sys.stderr)
        return 2
    start = time.monotonic()
    num_caught = 0
    try:
        check_without_mutants(build, mutants)
    except MutantError as error:
        print(f"mutate: {error}", file=sys.stderr)
        return 2
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        tried = {pool.submit(try_mutant, build, mutant): mutant for mutant in mutants}
        for number, done in enumerate(concurrent.futures.as_completed(tried), 1):
            verdict, seen = done.result()
            num_caught += verdict == "caught"
            print(f"[{number:3}/{len(mutants)}] {verdict:8} {tried[done].name:40} {seen}", flush=True)
    print(f"{num_caught} of {len(mutants)} mutants caught in {time.monotonic() - start:.0f} s")
    return 0 if num_caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
