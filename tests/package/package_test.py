"""The installed package serves a stranger, shared and static, and exports what the headers promise and no more.

usage: package_test.py --build BUILD [--cxx COMPILER] [--cc COMPILER] [--nm NM] [unittest options]
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OPTIONS = argparse.Namespace()

PUBLIC_PREFIXES = ("fovea::", "fovea_", "typeinfo for fovea::", "typeinfo name for fovea::", "vtable for fovea::")


def run(*command: object, cwd: pathlib.Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        shown = " ".join(str(word) for word in command)
        raise AssertionError(f"{shown}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def exported_symbols(library: pathlib.Path) -> list[str]:
    """Demangled names of what a dynamic library defines, without argument lists' trailing versions."""
    lines = run(OPTIONS.nm, "-D", "-C", "--defined-only", library).splitlines()
    return [line.split(maxsplit=2)[2] for line in lines]


def header_text() -> str:
    texts = [path.read_text() for path in sorted((ROOT / "include" / "fovea").glob("*.h*"))]
    without_comments = re.sub(r"//[^\n]*|/\*.*?\*/", "", "\n".join(texts), flags=re.DOTALL)
    return re.sub(r"^#.*$", "", without_comments, flags=re.MULTILINE)


def promised_functions(text: str) -> set[str]:
    """Names of the functions that headers mark as exported (classes aside)."""
    declarations = re.findall(r"FOVEA_(?:EXPORT|API)\s+(?!class|struct)([^;{}]*?)\(", text)
    return {match[0] for declaration in declarations if (match := re.search(r"(operator\S+|\w+)\s*$", declaration))}


class Package(unittest.TestCase):
    prefix: pathlib.Path

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory(prefix="fovea-package-")
        cls.addClassCleanup(folder.cleanup)
        cls.scratch = pathlib.Path(folder.name)
        cls.prefix = cls.scratch / "prefix"
        run("cmake", "--install", OPTIONS.build, "--prefix", cls.prefix)

    def library(self, name: str) -> pathlib.Path:
        found = sorted(self.prefix.glob(f"lib*/**/{name}"))
        self.assertTrue(found, f"{name} is not installed")
        return found[0]

    def build_stranger(self, name: str, *definitions: str) -> pathlib.Path:
        build = self.scratch / name
        run("cmake", "-S", HERE / "stranger", "-B", build, "-G", OPTIONS.generator, f"-DCMAKE_PREFIX_PATH={self.prefix}",
            f"-DCMAKE_CXX_COMPILER={OPTIONS.cxx}", f"-DCMAKE_C_COMPILER={OPTIONS.cc}", *definitions)
        run("cmake", "--build", build)
        return build

    def links_shared(self, program: pathlib.Path) -> bool:
        return "libfovea.so" in run("readelf", "-d", program)

    def test_stranger_links_static_by_default(self) -> None:
        build = self.build_stranger("default")
        self.assertIn("attention right, refusal right", run(build / "from_cpp"))
        self.assertFalse(self.links_shared(build / "from_cpp"))
        run(build / "from_c")

    def test_stranger_links_shared_by_name(self) -> None:
        build = self.build_stranger("shared", "-DFOVEA_KIND=shared")
        self.assertIn("attention right, refusal right", run(build / "from_cpp"))
        self.assertTrue(self.links_shared(build / "from_cpp"))
        run(build / "from_c")

    def run_first_caller(self, header: str) -> subprocess.CompletedProcess[str]:
        """first_caller.c, compiled against this header and linked with the installed library."""
        folder = self.scratch / "first"
        folder.mkdir(exist_ok=True)
        (folder / "first_fovea.h").write_text(header)
        (folder / "first_caller.c").write_text((HERE / "first_caller.c").read_text())
        library = self.library("libfovea.so")
        run(OPTIONS.cc, "-std=c11", "-Wall", "-Wextra", "-Werror", folder / "first_caller.c", "-o", folder / "first_caller", library,
            f"-Wl,-rpath,{library.parent}", "-lm")
        return subprocess.run([str(folder / "first_caller")], capture_output=True, text=True)

    def test_a_caller_of_the_first_header_still_works(self) -> None:
        done = self.run_first_caller((HERE / "first_fovea.h").read_text())
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)

    def test_a_member_in_the_middle_of_a_struct_would_be_seen(self) -> None:
        """Header and library then differ in where fields lie, whichever of the two has the member."""
        first = (HERE / "first_fovea.h").read_text()
        for struct, before in (("fovea_attention_forward_args", "const DLTensor* k;"),
                               ("fovea_attention_forward_args", "fovea_runtime* runtime;"),
                               ("fovea_plan_options", "int64_t max_seqlen_kv;"), ("fovea_attention_backward_args", "const DLTensor* dq;"),
                               ("fovea_attention_decode_args", "const DLTensor* append_k;"),
                               ("fovea_merge_states_args", "const DLTensor* out;"), ("fovea_executor", "void (*run)")):
            begin = first.index(f"typedef struct {struct} {{")
            at = first.index(before, begin)
            self.assertLess(at, first.index(f"}} {struct};"), before)
            done = self.run_first_caller(first[:at] + "int64_t inserted; " + first[at:])
            self.assertNotEqual(done.returncode, 0, f"{struct}: a member before {before} is not seen")

    def test_unknown_component_is_refused(self) -> None:
        with self.assertRaisesRegex(AssertionError, "Fovea"):
            self.build_stranger("unknown", "-DFOVEA_KIND=quantum")

    def test_static_library_needs_only_threads_and_the_loader(self) -> None:
        targets = self.library("FoveaTargets.cmake").read_text()
        linked = re.findall(r'INTERFACE_LINK_LIBRARIES "([^"]*)"', targets)
        needed = {library for libraries in linked for library in libraries.split(";")}
        self.assertLessEqual(needed - {r"\$<LINK_ONLY:Threads::Threads>"}, {rf"\$<LINK_ONLY:{OPTIONS.dl}>"})

    def test_every_exported_symbol_is_public(self) -> None:
        leaked = [name for name in exported_symbols(self.library("libfovea.so")) if not name.startswith(PUBLIC_PREFIXES)]
        self.assertEqual(leaked, [])

    def test_every_exported_name_stands_in_a_header(self) -> None:
        words = set(re.findall(r"\w+", header_text()))
        strangers = []
        for name in exported_symbols(self.library("libfovea.so")):
            plain = re.sub(r"\[abi:\w+\]|^(typeinfo|vtable)( name)? for ", "", name).split("(")[0]
            named = [part for part in re.findall(r"\w+", plain.replace("operator", "")) if part != "fovea"]
            if not set(named) <= words:
                strangers.append(name)
        self.assertEqual(strangers, [])

    def test_every_promised_function_is_exported(self) -> None:
        exported = {name.split("(")[0].replace("fovea::", "").split("[abi")[0].strip()
                    for name in exported_symbols(self.library("libfovea.so"))}
        self.assertEqual(sorted(promised_functions(header_text()) - exported), [])

    def test_installed_headers_are_the_public_ones(self) -> None:
        installed = {path.name for path in (self.prefix / "include" / "fovea").iterdir()}
        self.assertEqual(installed, {path.name for path in (ROOT / "include" / "fovea").iterdir()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--generator", default="Ninja")
    parser.add_argument("--dl", default="dl", help="the library of dlopen, as CMake calls it")
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
