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
    ],
)
def test_passes_are_warmed_up_within_the_limits(limits, new):
    model = NotingModel()
    room = {"context_tokens": 256, "num_pages": 256, "max_on_demand_tokens": 8}
    runner = new_runner(model, queues_steps=True, **room | limits)
    warm_up(runner, None)
    assert model.passes == [[(0, min(64, runner.limits.context_tokens - 1))]]
    model.passes.clear()
    warm_up_passes(runner)
    assert model.passes == ([] if new is None else [[(PREFIX_TOKENS, new)]])
    result = runner.execute(start_plan(0, [1, 2, 3], 0, num_pages=3))
    assert tokens_of(result) == {0: expected_next([1, 2, 3])}
