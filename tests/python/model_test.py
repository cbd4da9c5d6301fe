"""The cycle model: its reader finds the usual way round a loop, whatever stands beside it, and its sums are those done by hand.

usage: model_test.py
"""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "model"))
import model  # noqa: E402
import sass  # noqa: E402

# A loop of four instructions that matter, a wait that fails and comes back, work that is done again where a vote says so, a branch
# whose predicate is an operand, and behind all that the loops that only wait.
CODE = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
        /*0020*/              @!P1 BRA `(.L_x_3) ;
.L_x_1:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   HGMMA.64x96x16.F32.BF16 R88, R180, gdesc[UR12].tnspB, R88, gsb0 ;
        /*0050*/                   MUFU.EX2 R3, R4 ;
        /*0060*/               @P2 BRA P3, `(.L_x_2) ;
        /*0070*/                   MUFU.EX2 R3, R4 ;
        /*0080*/                   FMNMX.FTZ R5, R5, R6, !PT ;
        /*0090*/                   FMNMX.FTZ R5, R5, R6, !PT ;
.L_x_2:
        /*00a0*/                   FADD R7, R7, R3 ;
        /*00b0*/               @P0 BRA `(.L_x_0) ;
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
        /*00e0*/              @!P1 BRA `(.L_x_3) ;
        /*00f0*/                   BRA `(.L_x_1) ;
"""


def blocks():
    return sass.blocks(sass.functions(CODE)["kernel"])


def names(path):
    return [x.op.split(".")[0] for x in path]


class Reader(unittest.TestCase):
    def test_the_usual_way_leaves_out_waits_that_fail_and_work_done_again(self):
        path = sass.usual_path(blocks(), {"MUFU.EX2": 1, "HGMMA": 2})
        self.assertEqual(sorted(names(path)), sorted(["SYNCS", "BRA", "HGMMA", "HGMMA", "MUFU", "BRA", "FADD", "BRA"]))

    def test_what_has_to_be_done_is_done_even_where_that_is_longer(self):
        path = sass.usual_path(blocks(), {"MUFU.EX2": 2})
        self.assertEqual(names(path).count("MUFU"), 2)
        self.assertEqual(names(path).count("FMNMX"), 2)

    def test_no_way_is_no_path(self):
        self.assertEqual(sass.usual_path(blocks(), {"MUFU.EX2": 3}), [])

    def test_counts_are_by_unit(self):
        counts = sass.counts(sass.usual_path(blocks(), {"MUFU.EX2": 2}))
        self.assertEqual((counts["mufu"], counts["alu"], counts["fma"], counts["wgmma"]), (2, 2, 1, 2))
        self.assertEqual(counts["issue"], 11)


def kernel(architecture, path=(), **spec):
    return model.Kernel("sm/attention_forward", architecture, {"head_dim_qk": 128, "head_dim_v": 128, "tile_q": 128, "tile_kv": 128,
                                                               "num_warps": 12, **spec}, False, {4096}, list(path), [])


class Sums(unittest.TestCase):
    def test_products_of_a_step(self):
        self.assertEqual(model.busy(kernel("sm_90a"))["products"], 2048)
        self.assertEqual(model.busy(kernel("sm_100a", tile_q=256))["products"], 2048)

    def test_shared_memory_of_wgmma_counts_a_where_it_lies_there(self):
        path = sass.usual_path(blocks(), {"HGMMA": 2})
        self.assertEqual(model.shared_bytes(kernel("sm_90a", path)), 2 * (32 * 128 + 2048 + 32 * 96))

    def test_shared_memory_of_blackwell(self):
        self.assertEqual(model.busy(kernel("sm_100a", tile_q=256))["shared"], 2 * 768)

    def test_backward_is_the_sum_of_its_lab_book(self):
        backward = model.Kernel("sm100/attention_backward", "sm_100a", {"head_dim_qk": 128, "head_dim_v": 128, "tile_q": 128, "tile_kv": 128,
                                                                        "num_warps": 16}, False, {4096}, [], [])
        self.assertEqual(model.busy(backward)["products"], 2560)
        self.assertEqual(model.busy(backward)["shared"], 2048 + 256 + 512)

    def test_one_group_takes_turns(self):
        clocks, limit = model.step_clocks(kernel("sm_100a", num_warps=8))
        self.assertEqual((clocks, limit), (1024 + model.MACHINES["sm_100a"].handover, "products and softmax in turns"))

    def test_causal_row_tiles_rise_and_the_longest_decides(self):
        causal = kernel("sm_90a")
        causal.is_causal = True
        self.assertEqual(model.row_tiles(causal, 512, 1), [(1, 1), (2, 1), (3, 1), (4, 1)])
        self.assertEqual(model.row_tiles(kernel("sm_90a"), 500, 1), [(4, 0)] * 4)
        one_each = model.call_clocks(causal, 512, 1, 1, step=1000)
        self.assertEqual(one_each, 4000 + sum(model.COSTS[name] for name in ("drained", "masked", "launch")))
        self.assertEqual(model.flops(causal, 2, 1, 1), 2 * 3 * 256)


if __name__ == "__main__":
    unittest.main()
