"""A continuous-batching loop: 64 requests share steps and pages, chunks of prompts beside single tokens, one call a step."""

from collections import defaultdict

import pytest

import fovea

torch = pytest.importorskip("torch")
import flash_formula as formula  # noqa: E402

NUM_REQUESTS, NUM_SLOTS, PAGE_SIZE = 64, 24, 16
DEVICES = {
    "cpu": {"dtype": torch.float32, "heads": (4, 2), "head_dim": 32, "longest_prompt": 90, "longest_answer": 9, "chunk": 24, "budget": 40},
    "cuda": {"dtype": torch.bfloat16, "heads": (32, 8), "head_dim": 128, "longest_prompt": 3000, "longest_answer": 20, "chunk": 256, "budget": 600},
}  # fmt: skip


@pytest.fixture(autouse=True)
def route() -> str:
    """In place of conftest's: who runs the calls is tested elsewhere."""
    return "extension"


class Traffic:
    """What the requests ask for: tokens by name, [tokens of the request, heads, head_dim]; queries of a token follow its prompt's."""

    def __init__(self, device, dtype, heads, head_dim, longest_prompt, longest_answer, chunk, budget) -> None:
        torch.manual_seed(0)
        self.device, self.chunk, self.budget = device, chunk, budget
        self.prompts = torch.randint(1, longest_prompt, (NUM_REQUESTS,)).tolist()
        self.lengths = [prompt + int(torch.randint(1, longest_answer, ())) for prompt in self.prompts]
        self.pages_each = -(-max(self.lengths) // PAGE_SIZE)

        def normal(length, num_heads):
            return torch.randn(length, num_heads, head_dim, device=device, dtype=dtype)

        self.q = [normal(length, heads[0]) for length in self.lengths]
        self.k, self.v = ([normal(length, heads[1]) for length in self.lengths] for _ in range(2))
        angles = torch.arange(max(self.lengths), device=device)[:, None] / 100.0 ** torch.linspace(0, 1, head_dim // 2, device=device)
        self.rotary = fovea.Rotary(angles.cos(), angles.sin())

    def steps(self):
        """Of each step, (request, its first token, the one behind its last): single tokens first, prompts fill the budget."""
        waiting, served = list(range(NUM_REQUESTS)), dict[int, int]()
        while waiting or served:
            while waiting and len(served) < NUM_SLOTS:
                served[waiting.pop(0)] = 0
            step, room = [], self.budget
            for request, begin in sorted(served.items(), key=lambda item: item[1] < self.prompts[item[0]]):
                size = 1 if begin >= self.prompts[request] else min(self.prompts[request] - begin, self.chunk, room)
                if size:
                    step.append((request, begin, begin + size))
                    room -= size
                    served[request] = begin + size
            served = {request: end for request, end in served.items() if end < self.lengths[request]}
            yield step


class Pages:
    """A pool that requests take pages from, at random, and give them back to; what nobody wrote is NaN."""

    def __init__(self, traffic, num_pages) -> None:
        shape = (num_pages, PAGE_SIZE, *traffic.k[0].shape[1:])
        self.k, self.v = (torch.full(shape, torch.nan, device=traffic.device, dtype=traffic.k[0].dtype) for _ in range(2))
        self.free = torch.randperm(num_pages).tolist()
        self.of = defaultdict(list)

    def reserve(self, request, length) -> None:
        while len(self.of[request]) * PAGE_SIZE < length:
            self.of[request].append(self.free.pop())

    def release(self, request) -> None:
        pages = self.of.pop(request)
        self.k[pages] = self.v[pages] = torch.nan
        self.free += pages

    def table(self, requests, width, device):
        return torch.tensor([self.of[r] + [-1] * (width - len(self.of[r])) for r in requests], dtype=torch.int32, device=device)


def run(traffic, pages, step):
    """Out and lse of each request's tokens of a step, which is padded to the budget: a plan's bounds are those of all steps."""
    requests, begins, ends = zip(*step)
    for request, end in zip(requests, ends):
        pages.reserve(request, end)
    sizes = [end - begin for begin, end in zip(begins, ends)]
    padding = traffic.budget - sum(sizes)
    q, k, v = (
        torch.cat([*(rows[r][begin:end] for r, begin, end in step), torch.full_like(rows[0][:1], torch.nan).expand(padding, -1, -1)])
        for rows in (traffic.q, traffic.k, traffic.v)
    )
    offsets = torch.tensor([0, *sizes]).cumsum(0).int().to(traffic.device)
    seqlens = torch.tensor(begins, dtype=torch.int32, device=traffic.device)
    cache = fovea.KvCache(pages.k, pages.v, seqlens, page_table=pages.table(requests, traffic.pages_each, traffic.device))
    out, lse = fovea.decode(
        q, cache, append_k=k, append_v=v, rotary=traffic.rotary, cu_seqlens=offsets, max_seqlen_q=traffic.chunk, return_lse=True
    )
    for request, end in zip(requests, ends):
        if end == traffic.lengths[request]:
            pages.release(request)
    assert not out[sum(sizes) :].any() and (lse[:, sum(sizes) :] == -torch.inf).all()
    return zip(requests, out[: sum(sizes)].split(sizes), lse[:, : sum(sizes)].split(sizes, 1))


def answers(traffic, pages, steps):
    """(out, lse) of each request, its steps behind each other."""
    parts = defaultdict(list)
    for step in steps:
        for request, out, lse in run(traffic, pages, step):
            parts[request].append((out, lse))
    return {request: (torch.cat([out for out, _ in made]), torch.cat([lse for _, lse in made], 1)) for request, made in parts.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_requests_have_the_bits_that_they_have_alone(device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    traffic = Traffic(device, **DEVICES[device])
    steps = list(traffic.steps())
    sizes = [{end - begin for _, begin, end in step} for step in steps]
    assert any(1 in those and len(those) > 1 for those in sizes)  # chunks of prompts beside single tokens
    together = answers(traffic, Pages(traffic, NUM_SLOTS * traffic.pages_each), steps)
    for request in range(NUM_REQUESTS):
        own = [[part] for step in steps for part in step if part[0] == request]
        out, lse = answers(traffic, Pages(traffic, traffic.pages_each), own)[request]
        assert torch.equal(together[request][0], out) and torch.equal(together[request][1], lse)
        assert torch.isfinite(out).all()
    shortest = min(range(NUM_REQUESTS), key=lambda request: traffic.lengths[request])
    turned = [fovea.rotary(rows[shortest][None], *traffic.rotary[:2]) for rows in (traffic.q, traffic.k)]
    dense = fovea.attention(*turned, traffic.v[shortest][None], causal=True)
    exact, _ = formula.attention(*(x.double().cpu() for x in turned), traffic.v[shortest][None].double().cpu(), causal=True)
    error, allowed = ((out.double().cpu() - exact).abs().max() for out in (together[shortest][0], dense))
    assert error <= 2 * allowed + torch.finfo(dense.dtype).eps * exact.abs().max()
