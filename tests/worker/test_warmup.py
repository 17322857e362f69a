"""First steps fit whatever limits there are, show the forms of a pass, and leave nothing."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        ({"max_pass_tokens": 300}, [(0, 64), (PREFIX_TOKENS, 64 + REST_TOKENS)]),
        ({"max_pass_tokens": 100}, [(0, 64), (PREFIX_TOKENS, 36)]),
        ({"max_pass_tokens": 300, "context_tokens": 80}, [(0, 64), (PREFIX_TOKENS, 51)]),
        ({"max_pass_tokens": 300, "context_tokens": 20}, [(0, 19)]),
        ({"max_pass_tokens": 64}, [(0, 64)]),
        ({"max_pass_tokens": 300, "max_rows": 1}, [(0, 64)]),
        ({"max_pass_tokens": 300, "page_size": 1}, [(0, 64), (PREFIX_TOKENS, 164)]),
    ],
)
def test_passes_are_warmed_up_within_the_limits(limits, rows):
    model = NotingModel()
    room = {"context_tokens": 256, "num_pages": 256, "max_on_demand_tokens": 8}
    runner = new_runner(model, queues_steps=True, **room | limits)
    warm_up(runner, None)
    model.passes.clear()
    warm_up_passes(runner)
    assert model.passes == [rows]
    result = runner.execute(start_plan(0, [1, 2, 3], 0, num_pages=3))
    assert tokens_of(result) == {0: expected_next([1, 2, 3])}
