"""bench_fair tells what a stream loses to a long prompt from the times of three streams."""

from __future__ import annotations

import asyncio
import random

import pytest
from bench_fair import Fairness, FairPlan, judge, measure, show
from openai_load import BenchError, Server, Timing

from tests.tools.fake_openai import FakeServer


def timing(sent_s: float, *events_s: float) -> Timing:
    return Timing(sent_s, events_s, 10, len(events_s), 0)


ALONE = (timing(0, 4.0), timing(0, 0.1), timing(0, 0.1, 0.2, 0.3))


def test_what_the_stream_lost_is_told() -> None:
    stream = timing(0, 0.9, 1.0, 1.1, 2.1, 2.2, 6.0, 6.1)
    result = judge(1000, ALONE, timing(1.05, 5.9), timing(1.2, 2.15), stream)
    assert result.gap_ms == pytest.approx(3800), "with the gap that the end falls in"
    assert result.gap_p50_ms == pytest.approx(550)
    assert result.during == 3
    assert result.short_first
    assert result.long_ms == pytest.approx(4850)
    assert result.share == pytest.approx((4.0 + 0.1 + 3 * 0.1) / 4.85)
    late = judge(1000, ALONE, timing(1.05, 5.9), timing(1.2, 5.95), stream)
    assert not late.short_first
    assert late.share == pytest.approx((4.0 + 3 * 0.1) / 4.85), "its work was not done by then"


@pytest.mark.parametrize("events_s", [(1.1, 2.0, 6.0), (0.9, 1.0, 5.8)])
def test_a_stream_that_does_not_span_the_long_prompt_tells_nothing(
    events_s: tuple[float, ...],
) -> None:
    with pytest.raises(BenchError, match="--stream-tokens"):
        judge(1000, ALONE, timing(1.05, 5.9), timing(1.2, 2.0), timing(0, *events_s))


def test_a_server_is_measured() -> None:
    """Of the fake's clock only the order of events is real: its streams advance it in turns."""
    fake = FakeServer()

    async def run() -> list[Fairness]:
        async with Server("http://fake", transport=fake, clock=fake.clock) as server:
            return await measure(server, FairPlan(300, 10, 2000, 0.0, 0.0, 2), random.Random(1))

    results = asyncio.run(run())
    assert [result.long_alone_ms for result in results] == pytest.approx([300.0] * 2)
    assert [result.short_alone_ms for result in results] == pytest.approx([10.0] * 2)
    assert [result.gap_alone_ms for result in results] == pytest.approx([10.0] * 2)
    assert "prompt of 300 beside a stream" in show(results)
