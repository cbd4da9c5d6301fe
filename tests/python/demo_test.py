"""The demo: right on the captured layers, and able to be wrong. Each planted difference must be seen against PyTorch's results.

usage: demo_test.py --fovea FOVEA
"""

import argparse
import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import demo  # noqa: E402

# Small departures from the captured problem: a key, a far corner of the window, a scale off by 0.07 %, a mild cap.
FAULTS = (("--causal",), ("--window", "200,200"), ("--mask-mod", "kv_idx != 100"), ("--scale", "0.1769"), ("--softcap", "50"))


class Demo(unittest.TestCase):
    def test_every_layer_is_right_and_the_map_is_drawn(self):
        printed = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            png = pathlib.Path(folder, "map.png")
            code = demo.demo(argparse.Namespace(fovea=OPTIONS.fovea, data=demo.DATA, repeat=1, png=png))
            self.assertTrue(png.read_bytes().startswith(b"\x89PNG"))
        print(printed.getvalue())
        self.assertEqual(code, 0)

    def test_planted_differences_are_seen(self):
        with tempfile.TemporaryDirectory() as folder:
            for fault in FAULTS:
                row = demo.run_layer(OPTIONS.fovea, demo.DATA / "moby_dick_layer3.safetensors", pathlib.Path(folder), 1, *fault)
                self.assertFalse(row["is_right"], fault)

    def test_missing_data_is_one_line_and_exit_code_two(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(demo.Missing, "no .safetensors in"):
                demo.demo(argparse.Namespace(fovea=OPTIONS.fovea, data=pathlib.Path(folder), repeat=1, png=None))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fovea", required=True)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
