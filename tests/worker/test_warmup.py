"""First steps fit whatever limits there are, show the forms of a pass, and leave nothing."""

from __future__ import annotations

from random import Random

import pytest

from freetoken.kernels.attention_ops import TILE_SIZES
from freetoken.kernels.library_attention import cut_queries
from freetoken.model.context import Segment
from freetoken.model.passes import find_bounds
from freetoken.worker.warmup import PREFIX_TOKENS, REST_TOKENS, warm_up, warm_up_passes
from tests.worker.fakes import HashModel, expected_next, new_runner
from tests.worker.plans import start_plan, tokens_of


class NotingModel(HashModel):
    """`passes`: the (cached, new) tokens of each row of each pass."""

    def __init__(self):
        super().__init__()
        self.passes = []

    def start_pass(self, ids, context, *args):
        self.passes.append([(part.cached_len, part.length) for part in context.segments])
        return super().start_pass(ids, context, *args)


LARGE = {
    "max_pass_tokens": 32768,
    "chunk_tokens": 8192,
    "context_tokens": 40960,
    "num_pages": 10240,
}


@pytest.mark.parametrize(
    ("limits", "new"),
    [
        ({"max_pass_tokens": 300}, 64 + REST_TOKENS),
        ({"max_pass_tokens": 100}, 100),
        ({"max_pass_tokens": 300, "context_tokens": 80}, 51),
        ({"max_pass_tokens": 300, "context_tokens": 29}, None),
        ({"max_pass_tokens": 300, "context_tokens": 30}, 1),
        ({"max_pass_tokens": 64}, 64),
        ({"max_pass_tokens": 300, "max_rows": 1}, 64 + REST_TOKENS),
        ({"max_pass_tokens": 300, "page_size": 1}, 64 + REST_TOKENS),
        (LARGE, 2 * 8192 + 4096 + REST_TOKENS),
        (LARGE | {"context_tokens": 10000}, 9971),
    ],
)
def test_passes_are_warmed_up_within_the_limits(limits, new):
    model = NotingModel()
    room = {"context_tokens": 256, "num_pages": 256, "max_on_demand_tokens": 8}
    runner = new_runner(model, queues_steps=True, **room | limits)
    warm_up(runner, None)
    chunk = min(runner.limits.chunk_tokens, runner.limits.context_tokens - 1)
    assert model.passes == [[(0, chunk)]]
    model.passes.clear()
    warm_up_passes(runner)
    assert model.passes == ([] if new is None else [[(PREFIX_TOKENS, new)]])
    result = runner.execute(start_plan(0, [1, 2, 3], 0, num_pages=3))
    assert tokens_of(result) == {0: expected_next([1, 2, 3])}


def attention_forms(cached, new, chunk_tokens):
    """What attention of a pass is asked for: tiles of a size, at a row's beginning or later."""
    forms = set()
    for lo, hi in find_bounds([Segment(0, 0, new, cached)], chunk_tokens):
        for piece in cut_queries(hi - lo, cached + hi, TILE_SIZES):
            if piece.tile is not None:
                forms.add((piece.tile, "own"))
                if cached + lo + piece.lo >= piece.tile:
                    forms.add((piece.tile, "earlier"))
    return forms


@pytest.mark.parametrize("chunk_tokens", [8192, 4096, 2048])
def test_no_pass_has_forms_of_attention_that_were_not_warmed_up(chunk_tokens):
    model = NotingModel()
    limits = LARGE | {"chunk_tokens": chunk_tokens, "max_on_demand_tokens": 8}
    runner = new_runner(model, queues_steps=True, **limits)
    warm_up(runner, None)
    warm_up_passes(runner)
    warm = set().union(*(attention_forms(*part, chunk_tokens) for [part] in model.passes))
    random = Random(0)
    for _ in range(2000):
        cached = random.choice([0, random.randrange(40000)])
        new = random.randint(1, min(32768, 40959 - cached))
        assert attention_forms(cached, new, chunk_tokens) <= warm, (cached, new)
