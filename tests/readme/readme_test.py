"""The README is true: its first program compiles and runs as printed, its other snippets stand in examples, its commands run.

usage: readme_test.py --library LIBFOVEA.A [--cxx COMPILER] [--fovea COMMAND] [unittest options]
"""

import argparse
import array
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OPTIONS = argparse.Namespace()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    lines = (line for block in blocks("console") for line in block.splitlines())
    return [line.removeprefix("$ ") for line in lines if line.startswith(f"$ {program} ")]


def write_npy(path: pathlib.Path, shape: tuple[int, ...], values: array.array) -> None:
    """An f32 array, row-major, as NumPy's format 1.0 stores it."""
    header = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    padded = header + b" " * (-(len(header) + 11) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + values.tobytes())


class Readme(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fovea-readme-")
        self.addCleanup(folder.cleanup)
        self.scratch = pathlib.Path(folder.name)

    def test_first_program_has_at_most_ten_lines_of_code(self) -> None:
        lines = [line for line in blocks("cpp")[0].splitlines() if line.strip() and not line.strip().startswith("//")]
        self.assertLessEqual(len(lines), 10)

    def test_first_program_is_the_first_example(self) -> None:
        example = (ROOT / "examples" / "first_call.cpp").read_text()
        self.assertEqual(blocks("cpp")[0], re.sub(r"\A(//[^\n]*\n)+", "", example))

    def test_first_program_compiles_and_runs_as_printed(self) -> None:
        source, program = self.scratch / "first.cpp", self.scratch / "first"
        source.write_text(blocks("cpp")[0])
        subprocess.run(
            [OPTIONS.cxx, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", source, OPTIONS.library,
             "-pthread", "-o", program], check=True)
        subprocess.run([program], check=True)

    def test_other_snippets_stand_in_an_example(self) -> None:
        examples = [path.read_text() for path in sorted((ROOT / "examples").glob("*.cpp"))]
        for block in blocks("cpp")[1:]:
            self.assertTrue(any(block in example for example in examples), f"not in any example:\n{block}")

    def test_commands_of_the_scripts_exist(self) -> None:
        usage = subprocess.run([ROOT / "scripts" / "dev", "help"], check=True, capture_output=True, text=True).stdout
        self.assertTrue(commands("scripts/dev"))
        for line in commands("scripts/dev"):
            self.assertRegex(usage, rf"(?m)^  {line.split()[1]}\b")

    def test_links_lead_somewhere(self) -> None:
        prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
        targets = re.findall(r"\]\(([^)#]+)\)", prose)
        self.assertEqual([target for target in targets if not (ROOT / target).exists()], [])

    def test_fovea_commands_run(self) -> None:
        if OPTIONS.fovea is None:
            self.skipTest("built without the fovea command")
        (self.scratch / "examples").symlink_to(ROOT / "examples")
        shape = (1, 96, 4, 32)  # longer than the window and than one tile's rows
        for index, name in enumerate(("q", "k", "v", "dout")):
            values = array.array("f", ((i * (index + 3)) % 17 / 8 - 1 for i in range(96 * 4 * 32)))
            write_npy(self.scratch / f"{name}.npy", shape, values)
        write_npy(self.scratch / "slopes.npy", (4,), array.array("f", (0.5, 0.25, 0.125, 0.0625)))
        self.assertTrue(commands("fovea"))
        for line in commands("fovea"):
            with self.subTest(line):
                words = [str(OPTIONS.fovea), *shlex.split(line)[1:]]
                done = subprocess.run(words, cwd=self.scratch, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--fovea", type=pathlib.Path)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
