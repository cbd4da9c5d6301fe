"""What must not compile does not, with a message that says why; its right twin does.

usage: refusals_test.py [--cxx COMPILER] [unittest options]
"""

import argparse
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS = argparse.Namespace()

# An mdspan as C++23 and Kokkos have them, as far as view asks.
MDSPAN = """
template <typename T>
struct Matrix {
  struct extents_type {
    static constexpr std::size_t rank() { return 2; }
    std::int64_t extent(std::size_t) const { return 2; }
  };
  extents_type extents() const { return {}; }
  std::int64_t stride(std::size_t dim) const { return dim == 0 ? 2 : 1; }
  T* data_handle() const { return data; }
  T* data;
};
"""

TYPES = "no tensor holds elements of this type"
ARGUMENT = "this argument does not hold elements of the view's type"


def view_of(element: str, how: str) -> str:
    return (f"#include <fovea/tensor.hpp>\n{MDSPAN}\nstatic {element} data[4] = {{}};\n"
            f"fovea::TensorView tensor() {{ return {how}; }}\n")


def use_of(statement: str) -> str:
    return f"#include <fovea/attention.hpp>\nvoid use() {{ {statement} }}\n"


class Refusals(unittest.TestCase):
    def compile(self, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([OPTIONS.cxx, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT}/include",
                               "-x", "c++", "-"], input=text, capture_output=True, text=True)

    def expect(self, wrong: str, right: str, message: str) -> None:
        compiled = self.compile(right)
        self.assertEqual(compiled.returncode, 0, f"{right}\n{compiled.stderr}")
        refused = self.compile(wrong)
        self.assertNotEqual(refused.returncode, 0, f"compiles: {wrong}")
        self.assertIn(message, refused.stderr)

    def test_elements_that_no_tensor_holds(self) -> None:
        for how in ("fovea::view(data, {2, 2})", "fovea::view(std::span(data))", "fovea::view(std::span(data), {2, 2})",
                    "fovea::view(Matrix<ELEMENT>{data})"):
            self.expect(view_of("double", how.replace("ELEMENT", "double")), view_of("float", how.replace("ELEMENT", "float")),
                        TYPES)

    def test_elements_that_an_argument_does_not_hold(self) -> None:
        def given(element: str, where: str) -> str:
            return (f"#include <fovea/backward.hpp>\n#include <fovea/jvp.hpp>\n#include <fovea/kv_cache.hpp>\n"
                    f"void use({element}* data) {{ auto t = fovea::view(data, {{1, 1, 1, 4}}); {where}; }}\n")
        for where, wrong, right in (
                ("fovea::attention_forward({.q = t, .k = t, .v = t, .out = t})", "std::int32_t", "fovea::float16"),
                ("fovea::AttentionForward args{.k = t}; args.q = t", "const std::int64_t", "const float"),
                ("static_cast<void>(fovea::AttentionForward{.lse = t})", "fovea::bfloat16", "float"),
                ("static_cast<void>(fovea::AttentionForward{.cu_seqlens_q = t})", "float", "std::int32_t"),
                ("static_cast<void>(fovea::AttentionBackward{.dq = t})", "bool", "fovea::bfloat16"),
                ("static_cast<void>(fovea::AttentionJvp{.out_tangent = t})", "std::uint8_t", "float"),
                ("static_cast<void>(fovea::KvCache{.page_table = t})", "float", "std::int64_t"),
                ("static_cast<void>(fovea::Rotary{.cos = t})", "std::int32_t", "float")):
            self.expect(given(wrong, where), given(right, where), ARGUMENT)
            erased = where.replace(" = t", " = fovea::TensorView(t)")
            self.assertEqual(self.compile(given(wrong, erased)).returncode, 0, erased)  # refused when it is called

    def test_results_that_are_dropped(self) -> None:
        for call in ("fovea::causal()", "fovea::causal() && fovea::window(3, 0)", "fovea::plan({})", "fovea::version()",
                     "fovea::softcap(3) | fovea::softcap(4)", "fovea::explain(fovea::Problem{})"):
            self.expect(use_of(f"{call};"), use_of(f"static_cast<void>({call});"), "nodiscard")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cxx", default="c++")
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
