"""Without an optional package the project still configures, and its messages name what is skipped.

usage: configure_test.py [--cxx COMPILER] [--cc COMPILER] [--generator NAME] [unittest options]
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS = argparse.Namespace()


class Configure(unittest.TestCase):
    def configure(self, *definitions: str) -> str:
        with tempfile.TemporaryDirectory(prefix="fovea-configure-") as build:
            done = subprocess.run(
                ["cmake", "-S", ROOT, "-B", build, "-G", OPTIONS.generator, f"-DCMAKE_CXX_COMPILER={OPTIONS.cxx}",
                 f"-DCMAKE_C_COMPILER={OPTIONS.cc}", *definitions], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"cmake {' '.join(definitions)}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def test_without_google_test(self) -> None:
        self.assertIn("Skipped without GoogleTest", self.configure("-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON"))

    def test_without_rapidcheck(self) -> None:
        skipped = self.configure("-DFOVEA_RAPIDCHECK_INCLUDE=", "-DFOVEA_RAPIDCHECK_LIBRARY=")
        self.assertIn("Skipped without RapidCheck: tests/property/", skipped)

    def test_without_boost_context(self) -> None:
        skipped = self.configure("-DFOVEA_BOOST_INCLUDE=", "-DFOVEA_BOOST_CONTEXT_LIBRARY=")
        self.assertIn("Skipped without Boost.Context", skipped)

    def test_without_an_interpreter_of_python(self) -> None:
        self.assertIn("Skipped without Python", self.configure("-DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON"))

    def test_the_command_needs_no_package_of_the_tests(self) -> None:
        hidden = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("GTest", "Python3", "benchmark")]
        self.assertNotIn("Skipped", self.configure("-DFOVEA_BUILD_TESTS=OFF", "-DFOVEA_BUILD_EXAMPLES=OFF", *hidden))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--generator", default="Ninja")
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
