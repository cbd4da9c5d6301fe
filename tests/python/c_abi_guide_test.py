"""The first program of docs/guides/c_abi.md compiles as C11, runs and prints what its comment says.

usage: c_abi_guide_test.py --cc CC --library libfovea.so
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "c_abi.md"


class Guide(unittest.TestCase):
    def test_first_program_compiles_and_runs(self):
        program = re.search(r"```c\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
        library = pathlib.Path(OPTIONS.library).resolve()
        with tempfile.TemporaryDirectory() as folder:
            source, binary = pathlib.Path(folder, "guide.c"), pathlib.Path(folder, "guide")
            source.write_text(program)
            subprocess.run([OPTIONS.cc, "-std=c11", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", source,
                            "-o", binary, library, f"-Wl,-rpath,{library.parent}"], check=True)
            done = subprocess.run([binary], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.split()[0], "1")

    def test_every_name_that_the_guide_speaks_of_stands_in_the_header(self):
        header = (ROOT / "include" / "fovea" / "fovea.h").read_text()
        names = set(re.findall(r"\b(?:fovea|FOVEA)_\w+\b", GUIDE.read_text()))
        self.assertEqual(sorted(name for name in names if not re.search(rf"\b{name}\b", header)), [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", required=True)
    parser.add_argument("--library", required=True)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
