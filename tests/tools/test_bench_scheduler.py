"""The benchmark of the scheduler runs, in one process and through the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetoken.wire.messages import StepMode, StepPlan, StepStats, pack_ids, unpack_ids
from tools.bench_scheduler import STAGES, Loop, main
from tools.fake_steps import answer, draw_ones


def test_it_reports_every_stage_and_the_throughput_with_each_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--rows", "4", "--waiting", "0", "40", "--steps", "10"]
    main([*sizes, "--rounds", "1", "--round-s", "0.3", "--json", str(out)])
    figures = json.loads(out.read_text())
    assert figures.keys() == {"steps_0", "steps_40", "followers_40", "turnover_40", "throughput"}
    assert figures["steps_40"].keys() >= set(STAGES)
    assert figures["throughput"].keys() == {"0", "40"}
    assert all(rate > 0 for [[rate, _]] in figures["throughput"].values())
    assert "40 waiting" in capsys.readouterr().out


def test_the_loop_keeps_its_rows_busy_and_the_others_waiting() -> None:
    loop = Loop(4, 30)
    for _ in range(20):
        loop.step()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (4, 30)


def test_followers_wait_for_the_prompt_that_computes_their_prefix() -> None:
    loop = Loop(4, 30, follow=True)
    for _ in range(5):
        loop.step()
    assert loop.scheduler.num_waiting > 20


def test_an_answer_names_the_sampled_rows_in_the_order_of_the_plan() -> None:
    decodes = pack_ids([3, 1])
    plan = StepPlan(7, 2, StepMode.ON_DEMAND, b"", (), (), (), (), decodes, pack_ids([10, 11]))
    result = answer(plan, draw_ones, StepStats())
    assert (result.step_id, result.epoch) == (7, 2)
    assert unpack_ids(result.row_ids).tolist() == [3, 1]
    assert unpack_ids(result.token_ids).tolist() == [1, 1]
