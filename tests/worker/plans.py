"""Step plans for tests."""

from __future__ import annotations

from freetoken.wire.messages import (
    Extend,
    PageRun,
    RowStart,
    Sampling,
    StepMode,
    StepPlan,
    pack_ids,
    unpack_ids,
)

GREEDY = Sampling(temperature=0.0)


def make_plan(**changes):
    """An empty plan of step 1, epoch 1, with `changes`."""
    values = {
        "step_id": 1,
        "epoch": 1,
        "mode": StepMode.ON_DEMAND,
        "forget_rows": b"",
        "page_copies": (),
        "starts": (),
        "page_runs": (),
        "extends": (),
        "decode_rows": b"",
        "decode_positions": b"",
    } | changes
    return StepPlan(**values)


def start_plan(
    row, prompt, first_page, *, num_pages=8, cached=0, is_last=True, sampling=GREEDY, **changes
):
    """Start `row` with a prompt whose first `cached` tokens are in its pages."""
    return make_plan(
        starts=(RowStart(row, sampling, 0, b"", b""),),
        page_runs=(PageRun(row, 0, pack_ids(range(first_page, first_page + num_pages))),),
        extends=(Extend(row, cached, pack_ids(prompt[cached:]), is_last),),
        **changes,
    )


def decode_plan(positions, **changes):
    """Decode rows at positions: {row: position}."""
    return make_plan(
        decode_rows=pack_ids(positions), decode_positions=pack_ids(positions.values()), **changes
    )


def tokens_of(result):
    """{row: token} of a StepResult."""
    return dict(zip(unpack_ids(result.row_ids), unpack_ids(result.token_ids), strict=True))
