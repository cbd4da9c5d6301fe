"""torch.func, forward mode and second derivatives through fovea.attention, against float64 of the formula written in PyTorch."""

import pytest

import fovea

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*(double precision|batching rule|requires_grad=True)")
B, SQ, SKV, HEADS, HEADS_KV, DIM, DIM_V = 2, 5, 7, 4, 2, 8, 6
SHAPES = {"q": (B, SQ, HEADS, DIM), "k": (B, SKV, HEADS_KV, DIM), "v": (B, SKV, HEADS_KV, DIM_V)}
OTHERS = {"bias": (HEADS, SQ, SKV), "alibi": (HEADS,), "sinks": (HEADS,), "table": (HEADS, 13)}
CAUSAL = torch.ones(SQ, SKV, dtype=torch.bool).tril(SKV - SQ)
DISTANCE = (torch.arange(SQ)[:, None] + SKV - SQ - torch.arange(SKV)).abs()
BUCKET = torch.arange(SQ)[:, None] - torch.arange(SKV) + 6


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def inputs(*names):
    shapes = SHAPES | OTHERS
    return [drawn(*shapes[name], seed=index) for index, name in enumerate(["q", "k", "v", *names])]


def formula(q, k, v, score=lambda s: s, visible=None, sinks=None):
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    s = score(torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5)
    if visible is not None:
        s = torch.where(visible, s, -torch.inf)
    logits = s if sinks is None else torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    lse = logits.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse[..., None]), v), lse


# Ours, the formula, and what they take beside q, k and v.
CASES = {
    "plain": (lambda *x: fovea.attention(*x, return_lse=True), formula, ()),
    "causal": (lambda *x: fovea.attention(*x, causal=True, return_lse=True), lambda *x: formula(*x, visible=CAUSAL), ()),
    "bias and softcap": (
        lambda q, k, v, b: fovea.attention(q, k, v, bias=b, softcap=2.0, return_lse=True),
        lambda q, k, v, b: formula(q, k, v, lambda s: 2 * torch.tanh(s / 2) + b), ("bias",),
    ),
    "alibi and sinks": (
        lambda q, k, v, a, s: fovea.attention(q, k, v, alibi=a, sinks=s, return_lse=True),
        lambda q, k, v, a, s: formula(q, k, v, lambda x: x - a[:, None, None] * DISTANCE, sinks=s), ("alibi", "sinks"),
    ),
    "captured": (
        lambda q, k, v, t: fovea.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s * (1 + t[h, i - j + 6]), mask_mod=lambda b, h, i, j: j <= i + 2, return_lse=True
        ),
        lambda q, k, v, t: formula(q, k, v, lambda s: s * (1 + t[:, BUCKET]), visible=CAUSAL), ("table",),
    ),
    "bhsd": (
        lambda *x: (lambda out, lse: (out.transpose(1, 2), lse))(
            *fovea.attention(*(y.transpose(1, 2) for y in x), layout="bhsd", return_lse=True)
        ),
        formula, (),
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def loss_of(function):
    """A number that depends on each element of out and lse in its own way."""

    def loss(*tensors):
        out, lse = function(*tensors)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        return (out.sin() * weights).sum() + lse.square().sum() / 8

    return loss


def assert_close(got, expected, tolerance=2e-5) -> None:
    if not isinstance(got, torch.Tensor):
        assert len(got) == len(expected)
        for mine, exact in zip(got, expected):
            assert_close(mine, exact, tolerance)
        return
    assert got.shape == expected.shape and got.dtype == torch.float32
    assert (got - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


def doubles(tensors):
    return [x.detach().double() for x in tensors]


@each_case
def test_forward_mode(name) -> None:
    ours, exact, names = CASES[name]
    given = inputs(*names)
    tangents = [drawn(*x.shape, seed=50) for x in given]
    got = jvp(ours, tuple(given), tuple(tangents))
    assert_close(got, jvp(exact, tuple(doubles(given)), tuple(doubles(tangents))))
    with forward_ad.dual_level():  # the same without torch.func, of k alone
        dual = [forward_ad.make_dual(x, t) if index == 1 else x for index, (x, t) in enumerate(zip(given, tangents))]
        moved = [forward_ad.unpack_dual(x).tangent for x in ours(*dual)]
    still = [t * (index == 1) for index, t in enumerate(tangents)]
    assert_close(moved, jvp(exact, tuple(doubles(given)), tuple(doubles(still)))[1])


@each_case
def test_second_derivatives_in_reverse(name) -> None:
    ours, exact, names = CASES[name]

    def penalty(function, tensors):
        tensors = [x.requires_grad_() for x in tensors]
        first = torch.autograd.grad(loss_of(function)(*tensors), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), tensors)

    given = inputs(*names)
    assert_close(penalty(ours, given), penalty(exact, doubles(given)), 1e-4)


@pytest.mark.parametrize("by", range(3))
@pytest.mark.parametrize("modes", ["reverse of reverse", "forward of reverse", "reverse of forward"])
def test_hessians(modes, by) -> None:
    first, second = {"reverse of reverse": (jacrev, jacrev), "forward of reverse": (jacrev, jacfwd), "reverse of forward": (jacfwd, jacrev)}[modes]
    ours, exact, _ = CASES["causal"]
    given = [x[:1, :2] for x in inputs()]

    def hessian_of(function, tensors):
        def loss(x):
            return loss_of(lambda *t: function(*t))(*tensors[:by], x, *tensors[by + 1 :])

        return second(first(loss))(tensors[by])

    def small(q, k, v):
        return formula(q, k, v, visible=torch.ones(2, 2, dtype=torch.bool).tril())

    assert_close(hessian_of(ours, given), hessian_of(small, doubles(given)), 1e-4)


def test_hessian_of_a_captured_tensor() -> None:
    ours, exact, names = CASES["captured"]
    q, k, v, table = inputs(*names)
    got = hessian(lambda t: loss_of(ours)(q, k, v, t))(table)
    assert_close(got, hessian(lambda t: loss_of(exact)(*doubles((q, k, v)), t))(table.double()), 1e-4)


def test_forward_of_forward_is_refused_by_name() -> None:
    q, k, v = inputs()
    with pytest.raises(fovea.Unsupported, match="forward mode of forward mode"):
        jacfwd(jacfwd(lambda x: loss_of(CASES["plain"][0])(x, k, v)))(q)


@each_case
def test_vmap_is_a_call_for_each_place(name) -> None:
    ours, exact, names = CASES[name]
    given = [torch.stack([drawn(*x.shape, seed=90 + place) for place in range(3)], 1) for x in inputs(*names)]
    got = vmap(ours, in_dims=1)(*given)
    expected = [torch.stack(column) for column in zip(*(exact(*doubles(x.select(1, place) for x in given)) for place in range(3)))]
    assert_close(got, expected)
    # What is not mapped is the same for all.
    got = vmap(ours, in_dims=(1, *(None,) * (len(given) - 1)))(given[0], *(x[:, 0] for x in given[1:]))
    expected = [
        torch.stack(column) for column in zip(*(exact(*doubles((given[0][:, place], *(x[:, 0] for x in given[1:])))) for place in range(3)))
    ]
    assert_close(got, expected)


@pytest.mark.parametrize("shape", [(SQ, SKV), (HEADS, 1, SKV), (1, HEADS, SQ, SKV), (B, 1, SQ, 1)])
def test_vmap_of_biases(shape) -> None:
    q, k, v = inputs()
    bias = drawn(3, *shape)
    masks = drawn(3, *shape, seed=1) > -1
    got = vmap(lambda b, m: fovea.attention(q, k, v, bias=b, mask=m))(bias, masks)
    expected = torch.stack([fovea.attention(q, k, v, bias=b, mask=m) for b, m in zip(bias, masks)])
    assert torch.equal(got, expected)


def test_one_call_serves_all_places(monkeypatch) -> None:
    from fovea.torch import _derivatives

    calls, forward = [], _derivatives.forward
    monkeypatch.setattr(_derivatives, "forward", lambda *args: calls.append(args) or forward(*args))
    q, k, v = inputs()
    ids = torch.zeros(B, SKV, dtype=torch.int32)
    vmap(lambda x: fovea.attention(x, k, v, causal=True, segment_ids=(ids[:, :SQ], ids)))(torch.stack([q, q, q]))
    assert len(calls) == 1
    vmap(lambda s: fovea.attention(q, k, v, sinks=s))(torch.zeros(3, HEADS))
    assert len(calls) == 4


@each_case
def test_gradients_of_each_sample(name) -> None:
    ours, exact, names = CASES[name]
    given = inputs(*names)
    samples = [torch.stack([drawn(*x.shape, seed=7 + place) for place in range(3)]) for x in given[:3]]
    shared = given[3:]
    by = tuple(range(len(given)))
    in_dims = (0, 0, 0, *(None,) * len(shared))
    got = vmap(grad(loss_of(ours), argnums=by), in_dims=in_dims)(*samples, *shared)
    assert_close(got, vmap(grad(loss_of(exact), argnums=by), in_dims=in_dims)(*doubles(samples), *doubles(shared)))


def test_vjp_of_vmap_and_vmap_of_jvp() -> None:
    ours, exact, _ = CASES["causal"]
    given = [torch.stack([x, 2 * x]) for x in inputs()]
    for function in (lambda f: lambda *t: vjp(vmap(f), *t)[1](vmap(f)(*t)), lambda f: vmap(lambda *t: jvp(f, t, t)[1])):
        assert_close(function(ours)(*given), function(exact)(*doubles(given)), 1e-4)


def test_dropout_under_vmap_asks_what_is_meant() -> None:
    q, k, v = inputs()
    three = torch.stack([q, q, q])

    def call(x):
        return fovea.attention(x, k, v, dropout=(0.5, 7))

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(three)
    same = vmap(call, randomness="same")(three)
    assert torch.equal(same[0], call(q)) and torch.equal(same[1], same[0])
    different = vmap(call, randomness="different")(three)
    assert not torch.equal(different[1], different[0])


def test_packed_sequences_under_transforms() -> None:
    q, k, v = (x[0] for x in inputs())
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)

    def call(q, k, v):
        return fovea.attention(q, k, v, cu_seqlens=offsets, return_lse=True)

    def exact(q, k, v):
        parts = [formula(q[None, a:b], k[None, c:d], v[None, c:d]) for a, b, c, d in ((0, 2, 0, 3), (2, 5, 3, 7))]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    many = [torch.stack([x, -x]) for x in (q, k, v)]
    assert_close(vmap(call)(*many), vmap(exact)(*doubles(many)))
    assert_close(grad(loss_of(call), argnums=(0, 1, 2))(q, k, v), grad(loss_of(exact), argnums=(0, 1, 2))(*doubles((q, k, v))))


@pytest.mark.parametrize("name", ["causal", "bias and softcap", "captured"])
def test_pytorchs_own_checks(name) -> None:
    """gradcheck's differences are of float32: coarse, but of every path that it knows."""
    ours, _, names = CASES[name]
    given = [x[:1, :3, :2].clone().requires_grad_() if index < 3 else x.clone().requires_grad_() for index, x in enumerate(inputs(*names))]
    if name == "bias and softcap":
        given[3] = drawn(2, 3, 3).requires_grad_()
    given[1:3] = [x[:, :, :1].detach().clone().requires_grad_() for x in given[1:3]]
    settings = {"eps": 2e-2, "atol": 5e-2, "rtol": 5e-2, "nondet_tol": 0.0}
    assert torch.autograd.gradcheck(ours, given, **settings, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, given, **settings, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_third_derivatives_are_refused_by_name() -> None:
    q, k, v = inputs()

    def derivative(function):
        return lambda x: grad(function)(x).square().sum()

    with pytest.raises(fovea.Unsupported, match="two at most"):
        grad(derivative(derivative(lambda x: loss_of(CASES["plain"][0])(x, k, v))))(q)
