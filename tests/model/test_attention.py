"""Paged attention against a naive model of it: one query, one head and one key at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from freetoken.model.attention import PagedAttention, Scores, attention_forward
from freetoken.model.context import KvPools, Segment, StepContext
from freetoken.model.step import StepIndex, cut_context

SIZE = 4
MAX_PAGES = 10


@dataclass(frozen=True)
class Case:
    """A step: (row, cached, new) for each segment, and what the layer looks like."""

    segments: tuple[tuple[int, int, int], ...]
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 8
    v_dim: int = 8
    side_by_side: bool = False


CASES = {
    "one extend": Case(((0, 0, 9),)),
    "an extend of a prefix": Case(((0, 6, 5),)),
    "one decode": Case(((0, 13, 1),)),
    "one decode, pages side by side": Case(((0, 13, 1),), side_by_side=True),
    "an extend, pages side by side": Case(((0, 6, 5),), side_by_side=True),
    "the first token": Case(((1, 0, 1),)),
    "decodes of one length": Case(((0, 9, 1), (1, 9, 1), (2, 9, 1))),
    "decodes of different lengths": Case(((0, 1, 1), (1, 30, 1), (2, 9, 1), (3, 12, 1))),
    "extends and decodes": Case(((0, 4, 6), (1, 0, 7), (2, 9, 1), (3, 21, 1))),
    "decodes between extends": Case(((2, 9, 1), (0, 4, 6), (3, 8, 1), (1, 0, 3))),
    "window": Case(((0, 4, 6), (1, 0, 12), (2, 9, 1), (3, 21, 1), (4, 2, 1)), window=5),
    "window of one": Case(((0, 4, 6), (1, 0, 7), (2, 9, 1)), window=1),
    "window as long as the row": Case(((0, 0, 9), (1, 8, 1), (2, 9, 1)), window=9),
    "window, side by side": Case(((0, 21, 1), (1, 5, 6)), window=5, side_by_side=True),
    "softcap": Case(((0, 4, 6), (1, 0, 7), (2, 9, 1), (3, 21, 1)), softcap=3.0),
    "sinks": Case(((0, 4, 6), (1, 0, 7), (2, 9, 1), (3, 21, 1)), sinks=True),
    "everything": Case(
        ((0, 4, 6), (1, 0, 7), (2, 9, 1), (3, 21, 1)),
        window=4,
        softcap=2.0,
        sinks=True,
        v_dim=6,
    ),
    "unequal k and v": Case(((0, 4, 6), (1, 0, 7), (2, 9, 1), (3, 21, 1)), v_dim=5),
    "no groups": Case(((0, 4, 6), (2, 9, 1), (3, 20, 1)), heads=3, kv_heads=3),
    "one kv head": Case(((0, 4, 6), (2, 9, 1), (3, 20, 1)), heads=6, kv_heads=1),
}


class Step:
    """Random pools with the cached tokens in them, q/k/v of the new ones."""

    def __init__(self, case: Case, *, garbage: float = 0.0) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(0)
        num_rows = 5
        num_pages = num_rows * MAX_PAGES
        order = torch.arange(num_pages)
        if not case.side_by_side:
            order = torch.randperm(num_pages, generator=self.generator)
        self.page_table = order.view(num_rows, MAX_PAGES).int()
        self.k = torch.full((num_pages + 1, SIZE, case.kv_heads, case.k_dim), garbage)
        self.v = torch.full((num_pages + 1, SIZE, case.kv_heads, case.v_dim), garbage)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for row, cached, new in case.segments:
            self.keys[row] = self.rand(cached + new, case.kv_heads, case.k_dim)
            self.values[row] = self.rand(cached + new, case.kv_heads, case.v_dim)
            for position in range(cached):
                page = self.page_table[row, position // SIZE]
                self.k[page, position % SIZE] = self.keys[row][position]
                self.v[page, position % SIZE] = self.values[row][position]
        num_tokens = sum(new for _, _, new in case.segments)
        self.query = self.rand(num_tokens, case.heads, case.k_dim)
        self.sinks = self.rand(case.heads) if case.sinks else None

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def context(self) -> StepContext:
        positions, rows, segments = [], [], []
        start = 0
        for row, cached, new in self.case.segments:
            positions += range(cached, cached + new)
            rows += [row] * new
            segments.append(Segment(row, start, new, cached))
            start += new
        pools = KvPools((self.k,), (self.v,), SIZE)
        return StepContext(
            torch.tensor(positions), torch.tensor(rows), self.page_table, tuple(segments), pools
        )

    def flat(self, of: dict[int, torch.Tensor]) -> torch.Tensor:
        """k or v of the new tokens as attention gets them: [1, G, T, D]."""
        parts = [of[row][cached:] for row, cached, _ in self.case.segments]
        return torch.cat(parts).transpose(0, 1)[None]

    def run(self, lo: int = 0, hi: int | None = None) -> torch.Tensor:
        hi = self.query.shape[0] if hi is None else hi
        attention = PagedAttention()
        attention.set_step(StepIndex(cut_context(self.context(), lo, hi)))
        return attention(
            0,
            self.query.transpose(0, 1)[None, :, lo:hi],
            self.flat(self.keys)[:, :, lo:hi],
            self.flat(self.values)[:, :, lo:hi],
            Scores(0.3, self.case.softcap, self.sinks),
            self.case.window,
        )[0]

    def naive(self) -> torch.Tensor:
        case = self.case
        out = torch.zeros(self.query.shape[0], case.heads, case.v_dim)
        token = 0
        for row, cached, new in case.segments:
            for position in range(cached, cached + new):
                first = 0 if case.window is None else max(0, position - case.window + 1)
                for head in range(case.heads):
                    kv_head = head // (case.heads // case.kv_heads)
                    keys = self.keys[row][first : position + 1, kv_head]
                    scores = keys @ self.query[token, head] * 0.3
                    if case.softcap is not None:
                        scores = case.softcap * torch.tanh(scores / case.softcap)
                    if self.sinks is not None:
                        scores = torch.cat([scores, self.sinks[head : head + 1]])
                    weights = scores.softmax(-1)[: len(keys)]
                    out[token, head] = weights @ self.values[row][first : position + 1, kv_head]
                token += 1
        return out


@pytest.mark.parametrize("name", list(CASES))
def test_attention_equals_the_naive_model(name: str) -> None:
    step = Step(CASES[name])
    torch.testing.assert_close(step.run(), step.naive(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(CASES))
def test_step_cut_into_chunks_equals_the_whole(name: str) -> None:
    step = Step(CASES[name])
    num_tokens = step.query.shape[0]
    parts = [step.run(lo, min(lo + 3, num_tokens)) for lo in range(0, num_tokens, 3)]
    torch.testing.assert_close(torch.cat(parts), step.naive(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(CASES))
def test_what_other_rows_left_in_the_pool_never_shows(name: str) -> None:
    step = Step(CASES[name], garbage=float("nan"))
    torch.testing.assert_close(step.run(), step.naive(), rtol=1e-5, atol=1e-5)


def test_k_and_v_of_new_tokens_are_written_to_their_pages_and_nowhere_else() -> None:
    step = Step(CASES["extends and decodes"])
    before = step.k.clone()
    step.run()
    for row, cached, new in step.case.segments:
        for position in range(cached, cached + new):
            page = step.page_table[row, position // SIZE]
            assert torch.equal(step.k[page, position % SIZE], step.keys[row][position])
            assert torch.equal(step.v[page, position % SIZE], step.values[row][position])
            before[page, position % SIZE] = step.keys[row][position]
    assert torch.equal(step.k, before)


@pytest.mark.parametrize(
    ("argument", "own", "expected"),
    [(7, None, 7), (None, 5, 5), (7, 5, 7), (None, None, None), (0, None, None), (None, 0, None)],
)
def test_window_is_the_argument_else_the_modules(
    argument: int | None, own: int | None, expected: int | None
) -> None:
    seen = []

    def attention(*call: object) -> torch.Tensor:
        seen.append(call[-1])
        return torch.zeros(1)

    module = torch.nn.Module()
    module.layer_idx = 0
    module.sliding_window = own
    module.freetoken_attention = attention
    x = torch.zeros(1, 1, 1, 1)
    attention_forward(module, x, x, x, None, sliding_window=argument)
    assert seen == [expected]
