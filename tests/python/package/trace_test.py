"""Callables with FlexAttention's signatures: traced, they give what PyTorch gives element by element."""

import functools
import inspect
import math
import warnings

import numpy as np
import pytest

import fovea

torch = pytest.importorskip("torch")

B, H, Q, KV = 2, 4, 20, 27  # small, no multiple of a vector; more keys than queries


def drawn(*shape: int, seed: int = 0) -> "torch.Tensor":
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32))


def integers(high: int, *shape: int) -> "torch.Tensor":
    return torch.from_numpy(np.random.default_rng([high, *shape]).integers(0, high, shape).astype(np.int32))


SLOPES, BIAS, BIAS4 = drawn(H), drawn(Q, KV), drawn(B, H, Q, KV)
TABLE, EMBEDDING = drawn(H, 64), drawn(B, 32, 16)
DOC, OFFSETS, LENGTHS = integers(3, B, 32), integers(8, B), torch.tensor([13, 27], dtype=torch.int32)
POSITIONS = integers(20, 32)
VISIBLE, BITS = drawn(32, 32) > 0, integers(2**30, 32)
LARGE = drawn(32, 300)
TEMPERATURE = torch.tensor(0.7)
STEP = 3


def causal(b, h, q, k):
    return q >= k


def and_masks(*masks):
    def joined(b, h, q, k):
        result = b.new_ones((), dtype=torch.bool)
        for mask in masks:
            result = result & mask(b, h, q, k)
        return result

    return joined


def or_masks(*masks):
    def joined(b, h, q, k):
        result = b.new_zeros((), dtype=torch.bool)
        for mask in masks:
            result = result | mask(b, h, q, k)
        return result

    return joined


def sliding(width):
    return lambda b, h, q, k: (q - k).abs() <= width


def causal_inside_documents(b, h, q, k):
    same = DOC[b, q] == DOC[b, k]
    return same & causal(b, h, q - OFFSETS[b], k - OFFSETS[b])


def natten(b, h, q, k, width=5, kernel=3):
    qx, qy, kx, ky = q // width, q % width, k // width, k % width
    center = qx.clamp(kernel // 2, (Q - 1) // width - kernel // 2)
    return ((center - kx).abs() <= kernel // 2) & ((qy - ky).abs() <= kernel // 2)


def morton(b, h, q, k):
    def spread(x):
        x = (x | (x << 4)) & 0x0F0F
        x = (x | (x << 2)) & 0x3333
        return (x | (x << 1)) & 0x5555

    return (spread(q) ^ spread(k)) < 300


class Window:
    """A callable object."""

    def __init__(self, left):
        self.left = left

    def __call__(self, b, h, q, k):
        return (k <= q) & (k >= q - self.left)

    def method(self, b, h, q, k):
        return q - k < self.left


def block_diffusion(b, h, q, k, block=4, n=12):
    q_clean, k_clean = q >= n, k >= n
    q_block = torch.where(q_clean, (q - n) // block, q // block)
    k_block = torch.where(k_clean, (k - n) // block, k // block)
    diagonal = (q_block == k_block) & (q_clean == k_clean)
    offset = (q_block > k_block) & k_clean & ~q_clean
    return diagonal | offset | ((q_block >= k_block) & k_clean & q_clean)


MASKS = {
    "causal": causal,
    "sliding": sliding(6),
    "causal and sliding": and_masks(causal, sliding(6)),
    "nested and, or": or_masks(and_masks(causal, sliding(3)), lambda b, h, q, k: k < 2, and_masks()),
    "prefix": or_masks(lambda b, h, q, k: k < LENGTHS[b], causal),
    "documents": lambda b, h, q, k: DOC[b, q] == DOC[b][k],
    "causal in documents": causal_inside_documents,
    "dilated": lambda b, h, q, k: (q - k) % STEP == 0,
    "remainder of a negative": lambda b, h, q, k: torch.remainder(q - k, 5) < 2,
    "natten": natten,
    "partial": functools.partial(natten, kernel=5),
    "morton": morton,
    "padding": lambda b, h, q, k: (q < LENGTHS[b]) & (k < LENGTHS[b]),
    "per head": lambda b, h, q, k: torch.where(h < 2, q >= k, q <= k),
    "global and sliding": lambda b, h, q, k: (k < 3) | (q < 3) | ((q - k).abs() < 4),
    "dense": lambda b, h, q, k: VISIBLE[q, k],
    "dense of a float": lambda b, h, q, k: BIAS4[b, h, q, k] > 0,
    "bits of a tree": lambda b, h, q, k: (BITS[q] >> (k % 30)) & 1 == 1,
    "inverted": lambda b, h, q, k: ~(VISIBLE[q][k] ^ (q > k)),
    "callable object": Window(5),
    "method": Window(5).method,
    "block diffusion": block_diffusion,
    "any of a row": lambda b, h, q, k: (VISIBLE[q, :8] & VISIBLE[k, 8:16]).any(),
    "all of a row": lambda b, h, q, k: torch.all(DOC[b, :4] < k),
    "a count": lambda b, h, q, k: VISIBLE[q].sum() > k,
    "logical words": lambda b, h, q, k: torch.logical_and(q > 2, torch.logical_not(k > 9)),
    "negative index": lambda b, h, q, k: VISIBLE[q - k, -1],
    "always": lambda b, h, q, k: b.new_ones((), dtype=torch.bool),
    "nan": lambda b, h, q, k: ~torch.isnan(BIAS[q, k] / 0.5),
    "take": lambda b, h, q, k: torch.take(VISIBLE, (q * 32 + k).long()),
    "cast": lambda b, h, q, k: (q.float() / 2).to(torch.int32) > k // 2,
    "chain of ands": lambda b, h, q, k: functools.reduce(lambda x, y: x & y, [(q + i) != k for i in range(40)]),
}


def bucket(distance, num_buckets=16, max_distance=32):
    """T5's, causal."""
    distance = torch.clamp(distance, min=0)
    exact = num_buckets // 2
    large = exact + (torch.log(torch.clamp(distance, min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)).to(torch.int32)
    return torch.where(distance < exact, distance, torch.minimum(large, torch.full_like(large, num_buckets - 1)))


SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "alibi of a power": lambda s, b, h, q, k: s - torch.exp2(-((h + 1) * 8.0 / H)) * (q - k).abs(),
    "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "softcap by a method": lambda s, b, h, q, k: (s / 2).tanh() * 2,
    "temperature": lambda s, b, h, q, k: s * TEMPERATURE,
    "bias": lambda s, b, h, q, k: s + BIAS[q, k],
    "bias by parts": lambda s, b, h, q, k: s + BIAS4[b][h][q, k],
    "bias by parts of parts": lambda s, b, h, q, k: s + BIAS4[:, 0][b, q][k],
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "bool beside number": lambda s, b, h, q, k: s + (q > k) * 0.5 + (k > q),
    "relative": lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-31, 31) + 31],
    "T5 buckets": lambda s, b, h, q, k: s + TABLE[h, bucket(q - k)],
    "rope by a dot": lambda s, b, h, q, k: s + (EMBEDDING[b, q] * EMBEDDING[b, k]).sum(),
    "dot": lambda s, b, h, q, k: s + torch.dot(EMBEDDING[b, q, :8], EMBEDDING[b, k, 8:]),
    "matmul": lambda s, b, h, q, k: s + EMBEDDING[b, q, ::2] @ EMBEDDING[b, k, ::2],
    "mean, max, min": lambda s, b, h, q, k: s + EMBEDDING[b, q].mean() + EMBEDDING[b, k].amax() - EMBEDDING[b, k, ...].min(),
    "sandwich": lambda s, b, h, q, k: s + torch.cos((q - k) * torch.arange(8) / 10).sum() * SLOPES[h],
    "sin cos tan": lambda s, b, h, q, k: torch.sin(s) + torch.cos(s) + torch.tan(s / 4),
    "erf and others": lambda s, b, h, q, k: torch.erf(s) + torch.expm1(s / 8) + torch.log1p(s.abs()) + s.sigmoid() + s.square().sqrt(),
    "rounding": lambda s, b, h, q, k: s.round() + s.floor() / 2 + s.ceil() / 4 + s.trunc() / 8,
    "fmod": lambda s, b, h, q, k: torch.fmod(s, 0.75) + s % 0.75,
    "sign, relu": lambda s, b, h, q, k: torch.sign(s) + torch.relu(s) + torch.nn.functional.silu(s),
    "powers": lambda s, b, h, q, k: s**2 + s.pow(3) / 8 + (s.abs() + 1) ** 0.5,
    "division": lambda s, b, h, q, k: s + q / (k + 1) + (q - k) // 3 + torch.div(k, 2, rounding_mode="floor"),
    "alpha": lambda s, b, h, q, k: torch.add(s, q - k, alpha=0.25),
    "where of numbers": lambda s, b, h, q, k: s * torch.where(h % 2 == 0, 1, 0.5),
    "a loop": lambda s, b, h, q, k: functools.reduce(lambda x, i: x + SLOPES[i] * (q > i), range(H), s),
    "fourteen squarings": lambda s, b, h, q, k: functools.reduce(lambda x, _: x * x, range(14), 1 + s / 2**16),
    "swapped operands": lambda s, b, h, q, k: 1 - s + (3 // (k + 1)) + 7 % (q + 1) + 2.0 / (k + 2),
    "max of two": lambda s, b, h, q, k: torch.maximum(s, SLOPES[h]) + torch.max(s, SLOPES[h]) - torch.min(s, SLOPES[h]),
    "logarithms": lambda s, b, h, q, k: torch.log(s.abs() + 1) + torch.log2(q + 1.0) + torch.rsqrt(k + 1.0) + torch.reciprocal(q + 1.0),
    "clone": lambda s, b, h, q, k: s.clone().detach().to(torch.float32).type_as(s) + torch.ones_like(s),
    "in place in name alone": lambda s, b, h, q, k: operator_iadd(s, SLOPES[h]),
}  # fmt: skip


def operator_iadd(s, x):
    s += x
    return s


class _IndexBySymbols(torch.overrides.TorchFunctionMode):
    """Old PyTorch's vmap takes an index of rank 0 for a number."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(place, torch.Tensor) for place in index):
                index = [torch.tensor(place) if isinstance(place, int) else place for place in index]
                if all(isinstance(place, torch.Tensor) for place in index):
                    return torch.ops.aten.index(args[0], index)
        return function(*args, **(kwargs or {}))


def dense(function, *first):
    """PyTorch's own evaluation, element by element, on the whole grid."""
    dims = [(0, None, None, None), (None, 0, None, None), (None, None, 0, None), (None, None, None, 0)]
    mapped = function
    for dim in reversed(dims):
        mapped = torch.vmap(mapped, in_dims=((0,) if first else ()) + dim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batching rules that are slow
        with _IndexBySymbols():
            try:
                return _mapped_over_the_grid(mapped, first)
            except RuntimeError as error:
                if "calling .item()" not in str(error):
                    raise
                pytest.skip("this PyTorch's vmap cannot index so")


def _mapped_over_the_grid(mapped, first):
    return mapped(*(x.clone() for x in first), *(torch.arange(extent, dtype=torch.int32) for extent in (B, H, Q, KV)))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    expected = dense(MASKS[name]).numpy()
    q, k = fovea.TensorSpec((B, Q, H, 8)), fovea.TensorSpec((B, KV, H, 8))
    np.testing.assert_array_equal(fovea.block_map(q, k, mask_mod=MASKS[name]).dense(), expected)


def scores_of(program, scores: np.ndarray) -> np.ndarray:
    """Each score after the program: those of one key alone, whose lse they are."""
    result = np.empty_like(scores)
    given = fovea.score_mod("s[batch, q_head, q_idx, kv_idx]", s=scores)
    q = np.ones((B, Q, H, 1), np.float32)
    k = np.ones((B, KV, H, 1), np.float32)
    for key in range(KV):
        mask = fovea.mask_mod("kv_idx == n", n=key)
        _, lse = fovea.attention(q, k, k, score_mod=given | program, mask_mod=mask, return_lse=True)
        result[..., key] = lse
    return result


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    scores = drawn(B, H, Q, KV, seed=7)
    expected = dense(SCORES[name], scores).numpy()
    got = scores_of(fovea.score_mod(SCORES[name]), scores.numpy())
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


def test_a_traced_formula_is_that_of_the_text() -> None:
    slopes = SLOPES
    traced = fovea.score_mod(lambda score, b, h, q_idx, kv_idx: score - slopes[h] * abs(q_idx - kv_idx))
    text = fovea.score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)", slopes=SLOPES)
    assert traced.canonical_text() == text.canonical_text()
    assert list(traced.captures) == ["slopes"]


def test_gather_and_index_select_of_one_place() -> None:
    by_index = fovea.mask_mod(lambda b, h, q, k: POSITIONS.gather(0, q) > VISIBLE.index_select(1, k)[q])
    assert by_index.text == fovea.mask_mod(lambda b, h, q, k: POSITIONS[q] > VISIBLE[q, k]).text


def test_tiles_of_a_traced_mask_are_those_of_the_word() -> None:
    spec = fovea.TensorSpec((1, 512, 1, 64))
    traced = fovea.block_map(spec, spec, mask_mod=and_masks(causal, lambda b, h, q, k: q - k <= 100))
    assert traced.counts == fovea.block_map(spec, spec, causal=True, window=(100, None)).counts


def test_numpy_arrays_that_a_function_encloses() -> None:
    slopes, table, doc = SLOPES.numpy(), TABLE.numpy(), DOC.numpy()
    scores = drawn(B, H, Q, KV, seed=7)
    helper = lambda h, d: table[h, np.clip(d, -31, 31) + 31]  # noqa: E731

    def formula(s, b, h, q, k, n=slopes):
        return np.where(q >= k, np.tanh(s) + n[h] + helper(h, q - k), s) + np.maximum(s, np.float32(0.5))

    def in_torch(s, b, h, q, k):
        distance = torch.clamp(q - k, -31, 31) + 31
        return torch.where(q >= k, torch.tanh(s) + SLOPES[h] + TABLE[h, distance], s) + torch.clamp(s, min=0.5)

    np.testing.assert_allclose(scores_of(fovea.score_mod(formula), scores.numpy()), dense(in_torch, scores).numpy(), 2e-6, 2e-6)
    program = fovea.mask_mod(lambda b, h, q, k: (doc[b, q] == doc[b][k]) & (slopes > 0.1).any())
    assert set(program.captures) == {"doc", "slopes"}
    assert formula.__closure__ is not None and slopes is not None  # the function itself is as it was


def refuse_if(b, h, q, k):
    if q > k:
        return k > 3
    return q > 2


def refuse_and(b, h, q, k):
    return q > k and k > 3


def refuse_min(b, h, q, k):
    return min(q, k) > 3


def refuse_in_place(b, h, q, k):
    return q.add_(1) > k


def refuse_append(b, h, q, k):
    return torch.searchsorted(DOC[0], q) > 1


def refuse_vmap(b, h, q, k):
    return torch.vmap(lambda x: x > k)(q)


REFUSED = {
    "if": (refuse_if, "if q > k", "torch.where"),
    "and": (refuse_and, "return q > k and", "&, | and ~"),
    "min of two": (refuse_min, "return min", "torch.minimum"),
    "list": (lambda b, h, q, k: [1, 2, 3][q] > k, "[1, 2, 3]", "index a tensor"),
    "item": (lambda b, h, q, k: q.item() > k, "q.item()", "item()"),
    "int": (lambda b, h, q, k: int(q) > k, "int(q)", "torch.int32"),
    "float": (lambda b, h, q, k: float(q) > k, "float(q)", "torch.float32"),
    "math": (lambda b, h, q, k: math.sin(q) > k, "math.sin", "float()"),
    "loop": (lambda b, h, q, k: sum(i for i in q) > k, "for i in q", "a loop"),
    "range": (lambda b, h, q, k: [i for i in range(q)] == k, "range(q)", "range"),
    "in place": (refuse_in_place, "q.add_(1)", "x = x.add"),
    "searchsorted": (refuse_append, "torch.searchsorted", "searchsorted is not in the language"),
    "vmap": (refuse_vmap, "torch.vmap", "vmap"),
    "bool index": (lambda b, h, q, k: VISIBLE[q > k, 0], "VISIBLE[q > k, 0]", "bool mask"),
    "float index": (lambda b, h, q, k: VISIBLE[q / 2, 0], "VISIBLE[q / 2, 0]", "type float"),
    "too many indices": (lambda b, h, q, k: VISIBLE[q, k, 0], "VISIBLE[q, k, 0]", "rank 2"),
    "too few indices": (lambda b, h, q, k: VISIBLE[q], "VISIBLE[q]", "shape (32,)"),
    "a large reduction": (lambda b, h, q, k: LARGE[q].sum() > k, "LARGE[q].sum()", "300 elements"),
    "outside": (lambda b, h, q, k: VISIBLE[q, 40], "VISIBLE[q, 40]", "index 40"),
    "number": (lambda b, h, q, k: q - k, "q - k", "a number (int)"),
    "nothing": (lambda b, h, q, k: None, "None", "returns nothing"),
    "large integer": (lambda b, h, q, k: q > 2**40, "2**40", "32 bits"),
    "half": (lambda b, h, q, k: q.half() > k, "q.half()", "half is not in the language"),
    "cast to half": (lambda b, h, q, k: q.to(torch.float16) > k, "torch.float16", "float16"),
    "signature": (lambda q, k: q >= k, "lambda q, k", "positional argument"),
    "an error of its own": (lambda b, h, q, k: undefined > k, "undefined", "NameError"),  # noqa: F821
    "numpy elsewhere": (lambda b, h, q, k: HOLDER.array[q] > k, "HOLDER.array", "variables that the function encloses"),
}


class HOLDER:
    array = np.arange(64)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_the_line_and_the_remedy(name: str) -> None:
    function, line, remedy = REFUSED[name]
    with pytest.raises(fovea.TraceError) as caught:
        fovea.mask_mod(function)
    error = caught.value
    assert remedy in str(error)
    assert error.filename == __file__
    with open(__file__) as file:
        assert line in file.read().splitlines()[error.lineno - 1]
    assert isinstance(error, fovea.InvalidArgument) and isinstance(error, TypeError)


def test_a_score_is_no_condition() -> None:
    with pytest.raises(fovea.TraceError, match="expected a score"):
        fovea.score_mod(lambda s, b, h, q, k: q > k)


def test_the_callables_are_many() -> None:
    assert len(MASKS) + len(SCORES) >= 61
    assert all(len(inspect.signature(mask).parameters) >= 4 for mask in MASKS.values())
