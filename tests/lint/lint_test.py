"""The rules bite: each finds a planted fault, and none fires on the right way to say the same."""

import pathlib
import sys
import unittest

sys.dont_write_bytecode = True

import env
import headers
import layers
import mutants
import tracked
import words
from tree import Source, strip_comments_and_strings


def file(path: str, text: str) -> Source:
    return Source(pathlib.PurePosixPath(path), text)


class Mutants(unittest.TestCase):
    def findings(self, line: str, extra: str = "") -> int:
        text = f'''
            [[mutant]]
            name = "a"
            breaks = "it"
            file = "src/a.cpp"
            line = "{line}"
            becomes = "return 2;"
            program = "unit_a"
            filter = "*"
            {extra}'''.replace("            ", "")
        return len(mutants.findings_of(text, [file("src/a.cpp", "int f() {\n  return 1;\n}\nint g() {\n  return 0;\n  return 3;\n}\nint h() {\n  return 3;\n}\n")]))

    def test_a_line_must_be_there_once_or_behind_another(self) -> None:
        self.assertEqual(self.findings("return 1;"), 0)
        self.assertEqual(self.findings("return..."), 1)
        self.assertEqual(self.findings("return...", 'after = "int g() {"'), 0)
        self.assertEqual(self.findings("return 4;"), 1)
        self.assertEqual(self.findings("return 1;", 'after = "int k() {"'), 1)

    def test_what_changes_nothing_is_no_mutant(self) -> None:
        self.assertEqual(self.findings("return 2;"), 1)

    def test_units_must_be_there(self) -> None:
        self.assertEqual(self.findings("return 1;", 'units = ["src/b.cpp"]'), 1)


class Tracked(unittest.TestCase):
    def test_caches_of_tools_are_not_the_project(self) -> None:
        self.assertEqual(len(tracked.findings_of({".mypy_cache/3.11/cache.0.db": 10, "docs/.DS_Store": 10})), 2)
        self.assertEqual(tracked.findings_of({".ci/run": 10, ".gitignore": 10, "src/core/env.cpp": 10}), [])

    def test_large_files_stay_out(self) -> None:
        self.assertEqual(len(tracked.findings_of({"examples/data/a.safetensors": tracked.MOST_BYTES + 1})), 1)


class Layers(unittest.TestCase):
    def test_a_module_must_not_know_the_rooms_after_it(self) -> None:
        rule = layers.modules_know_the_modules_before_them
        self.assertEqual(len(rule([file("src/mask/a.cpp", '#include "plan/select.hpp"\n')])), 1)
        self.assertEqual(rule([file("src/plan/a.cpp", '#include "mask/block_map.hpp"\n')]), [])

    def test_backends_do_not_know_each_other(self) -> None:
        rule = layers.modules_know_the_modules_before_them
        self.assertEqual(len(rule([file("src/cpu/a.cpp", '#include "reference/attention_forward.hpp"\n')])), 1)

    def test_a_new_module_needs_a_place_in_the_order(self) -> None:
        self.assertEqual(len(layers.modules_know_the_modules_before_them([file("src/attic/a.cpp", "")])), 1)

    def test_public_headers_include_public_and_standard_headers(self) -> None:
        rule = layers.public_headers_stay_public
        for name in ('"core/check.hpp"', "<fmt/format.h>", "<immintrin.h>", '"other.hpp"'):
            self.assertEqual(len(rule([file("include/fovea/a.hpp", f"#include {name}\n")])), 1, name)
        self.assertEqual(rule([file("include/fovea/a.hpp", '#include <vector>\n#include <stdint.h>\n#include "fovea/b.hpp"\n')]), [])

    def test_device_text_includes_what_is_embedded(self) -> None:
        rule = layers.device_text_includes_itself
        mma = file("src/cuda/device/ptx/mma.cuh", "")
        types = file("src/cuda/device/shared/types.h", "#include <cstdint>\n")
        self.assertEqual(rule([mma, types, file("src/cuda/device/sm80/a.cuh", '#include "ptx/mma.cuh"\n#include "shared/types.h"\n')]), [])
        for name in ("<cuda_bf16.h>", "<cstdint>", '"ptx/missing.cuh"', '"core/check.hpp"', '"../mask/a.hpp"'):
            self.assertEqual(len(rule([mma, file("src/cuda/device/sm80/a.cuh", f"#include {name}\n")])), 1, name)
        self.assertEqual(len(rule([mma, file("src/cuda/device/shared/a.h", '#include "ptx/mma.cuh"\n')])), 1)
        self.assertEqual(rule([mma, types, file("src/cuda/amd/ptx/mma.cuh", '#include "shared/types.h"\n#include "ptx/mma.cuh"\n')]), [])
        self.assertEqual(len(rule([mma, file("src/cuda/amd/ptx/mma.cuh", "#include <hip/hip_runtime.h>\n")])), 1)

    def test_kernels_of_the_tools_include_the_librarys_text_and_no_library_includes_theirs(self) -> None:
        rule = layers.device_text_includes_itself
        there = [file("src/cuda/device/ptx/mma.cuh", ""), file("src/cuda/device/shared/types.h", ""), file("tools/rates/p.h", "")]
        both = '#include "ptx/mma.cuh"\n#include "rates/p.h"\n'
        self.assertEqual(rule([*there, file("tools/rates/a.cuh", both), file("tools/rates/b.h", '#include "shared/types.h"\n')]), [])
        for path, name in (("tools/rates/a.cuh", "rates/missing.cuh"), ("tools/rates/a.cuh", "files.hpp"), ("tools/rates/b.h", "ptx/mma.cuh"),
                           ("src/cuda/device/sm80/a.cuh", "rates/p.h")):
            self.assertEqual(len(rule([*there, file(path, f'#include "{name}"\n')])), 1, name)
        rule = layers.host_reads_shared_structs_only
        self.assertEqual(rule([file("tools/a.cpp", '#include "rates/p.h"\n')]), [])
        self.assertEqual(len(rule([file("tools/a.cpp", '#include "rates/a.cuh"\n')])), 1)

    def test_host_code_reads_shared_structs_and_no_emulator(self) -> None:
        rule = layers.host_reads_shared_structs_only
        self.assertEqual(rule([file("src/cuda/a.cpp", '#include "cuda/device/shared/spec.h"\n')]), [])
        for name in ('"cuda/device/ptx/mma.cuh"', '"ptx/mma.cuh"', '"shared/spec.h"', '"cuda/emulator/emulator.hpp"'):
            self.assertEqual(len(rule([file("src/cuda/a.cpp", f"#include {name}\n")])), 1, name)
        self.assertEqual(rule([file("tests/emulator/a_test.cpp", '#include "cuda/emulator/emulator.hpp"\n')]), [])
        self.assertEqual(rule([file("src/cuda/emulator/a.cpp", '#include "cuda/emulator/machine.hpp"\n')]), [])


class Words(unittest.TestCase):
    def test_assembly_stands_in_ptx_only(self) -> None:
        code = 'void f() { asm volatile("nop"); }\n'
        self.assertEqual(len(words.assembly_stands_in_ptx_only([file("src/cpu/a.cpp", code)])), 1)
        self.assertEqual(words.assembly_stands_in_ptx_only([file("src/cuda/device/ptx/a.cuh", code)]), [])
        self.assertEqual(len(words.assembly_stands_in_ptx_only([file("src/cuda/emulator/device/ptx/a.cuh", code)])), 1)
        self.assertEqual(len(words.assembly_stands_in_ptx_only([file("src/cuda/amd/ptx/mfma.cuh", code)])), 1)

    def test_environment_is_read_in_one_place(self) -> None:
        code = 'auto x = std::getenv("HOME");\n'
        self.assertEqual(len(words.environment_is_read_in_one_place([file("tools/a.cpp", code)])), 1)
        self.assertEqual(words.environment_is_read_in_one_place([file("src/core/env.cpp", code)]), [])

    def test_library_is_silent(self) -> None:
        for code in ("std::cerr << 1;", 'printf("x");', "std::abort();", "exit(1);", "assert(x);", "write(STDERR_FILENO, x, 1);"):
            self.assertEqual(len(words.library_is_silent([file("src/core/a.cpp", code + "\n")])), 1, code)
        for code in ("std::snprintf(b, 1, f);", "FOVEA_ASSERT(x);", "static_assert(x);", "// printf(x)", "map.exit(1);"):
            self.assertEqual(words.library_is_silent([file("src/core/a.cpp", code + "\n")]), [], code)

    def test_comments_end_in_time(self) -> None:
        rule = words.comments_end_in_time
        for start in ("// ", "  /// ", "/* ", " * "):
            self.assertEqual(len(rule([file("src/a.cpp", start + "x" * 121 + "\n")])), 1, start)
            self.assertEqual(rule([file("src/a.cpp", start + "x" * (120 - len(start)) + "\n")]), [], start)
        self.assertEqual(rule([file("src/a.cpp", "f(" + "x" * 121 + ");\n")]), [])

    def test_nothing_is_left_over(self) -> None:
        self.assertEqual(len(words.nothing_is_left_over([file("README.md", "TO" "DO: more\n")])), 1)
        self.assertEqual(len(words.nothing_is_left_over([file("a.sh", "cd /" "home/me\n")])), 1)


class Environment(unittest.TestCase):
    def test_page_and_code_agree(self) -> None:
        code = file(env.READER, 'find(lookup, "FOVEA_A")\n')
        self.assertEqual(env.page_and_code_agree([code, file(env.PAGE, "| `FOVEA_A` | x |\n")]), [])
        self.assertEqual(len(env.page_and_code_agree([code, file(env.PAGE, "| `FOVEA_B` | x |\n")])), 2)


class Headers(unittest.TestCase):
    def test_a_header_opens_with_a_comment(self) -> None:
        self.assertEqual(len(headers.opens_with_a_comment([file("src/core/a.hpp", "#pragma once\n")])), 1)
        self.assertEqual(headers.opens_with_a_comment([file("src/core/a.hpp", "// Things.\n#pragma once\n")]), [])


    def test_the_build_compiles_what_its_source_includes_first(self) -> None:
        header = file("src/core/a.hpp", "// Things.\n#pragma once\n")
        for text, is_first in (
            ('#include "core/a.hpp"\n#include <array>\n', True),
            ('#include <array>\n#include "core/a.hpp"\n', False),
            ('#include "expr/a.hpp"\n', False),
            ("", False),
        ):
            source = file("src/core/a.cpp", text)
            self.assertEqual(headers.is_first_in_its_source(header, {source.path: source}), is_first)
        self.assertFalse(headers.is_first_in_its_source(header, {}))


class Stripping(unittest.TestCase):
    def test_comments_and_strings_are_blank_and_lines_stay(self) -> None:
        text = 'a; // exit(1)\n/* x\n */ b("asm(");\n'
        self.assertEqual(strip_comments_and_strings(text), 'a; \n\n b("");\n')


if __name__ == "__main__":
    unittest.main()
