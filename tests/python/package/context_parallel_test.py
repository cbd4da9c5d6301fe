"""Context parallelism in four processes over gloo: every scheme equals one process, and ranks that disagree all say so."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("PyTorch has no gloo", allow_module_level=True)
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
    pytest.skip("ranks of PyTorch 2.4 abort in gloo: context parallelism is for newer ones", allow_module_level=True)

import fovea
import fovea.torch
from fovea import parallel

WORKER = pathlib.Path(__file__).with_name("context_parallel_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    store = tmp_path_factory.mktemp("context_parallel") / "store"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1",
                   "FOVEA_NUM_THREADS": "1"}  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-B", str(WORKER), str(store)], env=environment, text=True, capture_output=True, timeout=400, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("scheme", parallel.SCHEMES)
def test_every_mask_and_head_count_equals_one_rank(results, scheme) -> None:
    cases = {name: wrong for name, wrong in results["cases"].items() if f", {scheme}, " in name}
    sizes = {int(name.split()[-2]) for name in cases}
    assert sizes == ({4} if scheme == "hybrid" else {1, 2, 3, 4})
    assert len(cases) >= 8, sorted(cases)
    assert {name: wrong for name, wrong in cases.items() if wrong} == {}


def test_decoding_over_pages_of_all_ranks_equals_one_cache(results) -> None:
    assert len(results["decoding"]) == 4 * 4 * 2
    assert {name: wrong for name, wrong in results["decoding"].items() if wrong} == {}


def test_decoding_is_refused_on_all_ranks(results) -> None:
    assert len(results["refused_decoding"]) == 4
    for error in results["refused_decoding"]:
        assert error.startswith("context_parallel_decode: rank 1: cache has no page_table")


def test_ranks_are_told_that_one_has_ended(results) -> None:
    assert len(results["survivors"]) == 3
    for error in results["survivors"]:
        assert "an exchange with other ranks failed; has one of them ended" in error


@pytest.mark.parametrize(
    "what, text",
    [
        ("shape", "rank 3: q has shape (2, 5, 12, 16); expected [batch, 12, 12, head_dim], this rank's tokens"),
        ("scheme", "scheme is ring on rank 3 but all_gather on rank 0; expected one problem on all ranks"),
        ("mask", "mask is let window_left = 5; let window_right = 0; "),
        ("dtype", "q is bfloat16 [2, 12, 12, 16] on rank 3 but float32 [2, 12, 12, 16] on rank 0"),
        ("score_mod", "score_mod is score * 2 on rank 3 but score * 3 on rank 0"),
        ("dropout", "rank 0: dropout is given and keys of a rank do not begin and end at multiples of 4"),
        ("dropout.places", "rank 0: dropout.places are given; expected none"),
        ("world_size", "rank 3: the group has 4 ranks; expected 2, those of the plan"),
    ],
)
def test_ranks_that_disagree_all_say_so(results, what, text) -> None:
    errors = results["refusals"][what]
    assert len(errors) == 4 and len(set(errors)) == 1
    assert text in errors[0]


def test_ranks_agree_again_after_a_refusal(results) -> None:
    assert results["refusals"]["accepted"] == ["accepted"] * 4


def test_placed_programs_read_other_positions_and_keep_their_names() -> None:
    table = torch.arange(4.0)
    program = fovea.score_mod("let far = q_idx - kv_idx; score + places[far] * places[q_idx]", places=table)
    placed = program.placed({"q_idx": "places[q_idx]"}, {"places": torch.tensor([2, 0, 1], dtype=torch.int32)})
    assert placed.text == "let far = places_2[q_idx] - kv_idx; score + places[far] * places[places_2[q_idx]]"
    assert placed.captures["places"] is table


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    class Mesh:
        ndim = 2

        def get_group(self):
            raise AssertionError

    spec = fovea.TensorSpec((1, 8, 1, 8))
    plan = parallel.context_parallel_plan(spec, spec, world_size=1)
    x = torch.zeros(1, 8, 1, 8)
    with pytest.raises(fovea.InvalidArgument, match="mesh of 2 dimensions; expected one"):
        fovea.torch.context_parallel_attention(x, x, x, plan, group=Mesh())
