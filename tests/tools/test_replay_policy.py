"""What the policy promises, and that it is compared with what it says it is compared with."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.experts.policy import SlotPolicy
from tools import replay_policy
from tools.replay_policy import (
    RECORDING,
    main,
    replay,
    replay_fixed,
    replay_lru,
    replay_optimum,
)
from tools.routing_traces import (
    Recording,
    Trace,
    cyclic,
    load_recording,
    lru_stack,
    mixed,
    recorded,
    save_recording,
    topics,
    uniform,
)

SHARES = [0.25, 0.5, 0.75]
TINY = st.lists(
    st.lists(st.integers(0, 4), unique=True, max_size=3).map(sorted), min_size=1, max_size=9
)


def tiny(steps: list[list[int]]) -> Trace:
    return Trace("tiny", 5, [[step] for step in steps], [True] * len(steps))


def slots(trace: Trace, share: float) -> int:
    return round(share * trace.num_layers * trace.num_experts)


@settings(deadline=None, max_examples=60)
@given(steps=TINY, num_slots=st.integers(0, 4))
def test_optimum_is_what_trying_everything_finds(steps: list[list[int]], num_slots: int) -> None:
    @cache
    def best(time: int, held: frozenset[int]) -> int:
        if time == len(steps):
            return 0
        there = held | set(steps[time])
        size = min(num_slots, len(there))
        nexts = (frozenset(keep) for keep in combinations(sorted(there), size))
        return len(held & set(steps[time])) + max(best(time + 1, keep) for keep in nexts)

    assert replay_optimum(tiny(steps), num_slots) == best(0, frozenset())


@given(steps=TINY, num_slots=st.integers(1, 4))
def test_lru_evicts_the_longest_unused(steps: list[list[int]], num_slots: int) -> None:
    used: dict[int, float] = {}
    hits = 0
    for time, step in enumerate(steps):
        found = [expert for expert in step if expert in used]
        hits += len(found)
        # Of one look-up, hits are older than loads; both in the order of experts.
        for place, expert in enumerate([*found, *(e for e in step if e not in used)]):
            if expert not in used and len(used) == num_slots:
                oldest = min(used, key=lambda e: used[e])
                if oldest in step:
                    break
                del used[oldest]
            used[expert] = time + place / 10
    assert replay_lru(tiny(steps), num_slots) == hits


def test_only_counted_steps_count() -> None:
    trace = Trace("", 4, [[[0]], [[0, 1]], [[0, 1]], [[0, 1]]], [True, True, False, True])
    assert trace.num_lookups == 5
    assert [policy(trace, 2) for policy in (replay, replay_lru, replay_optimum)] == [3, 3, 3]
    assert replay_fixed(trace, 1) == 3


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", [1, 2])
def test_policy_comes_close_to_lru_where_recency_is_all_that_counts(
    share: float, seed: int
) -> None:
    trace = lru_stack(num_layers=3, num_steps=500, seed=seed)
    num_slots = slots(trace, share)
    assert replay(trace, num_slots) >= 0.98 * replay_lru(trace, num_slots)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("rows", [1, 4])
def test_policy_beats_lru_on_recorded_routing(share: float, rows: int) -> None:
    recording = load_recording(RECORDING)
    trace = recorded(Recording(recording.num_experts, recording.conversations[:8]), rows)
    num_slots = slots(trace, share)
    assert replay(trace, num_slots) >= replay_lru(trace, num_slots)


@pytest.mark.parametrize("share", SHARES)
def test_wide_steps_repeated_hit_nearly_what_the_best_fixed_set_does(share: float) -> None:
    trace = cyclic(num_layers=3, num_steps=30)
    num_slots = slots(trace, share)
    assert replay_lru(trace, num_slots) < 0.7 * replay_fixed(trace, num_slots)
    assert replay(trace, num_slots) >= 0.95 * replay_fixed(trace, num_slots)


@pytest.mark.parametrize("share", SHARES)
def test_wide_steps_are_learnt_by_slots_full_of_other_experts(share: float) -> None:
    """0.7 of the best fixed set is reached within ten steps of the change."""
    before, wide = uniform(3, 200, rows=3), cyclic(3, 30)
    policy = SlotPolicy(num_slots := slots(wide, share))
    hits = [run_step(policy, step) for step in [*before.steps, *wide.steps]]
    assert hits[len(before.steps) + 10] >= 0.7 * num_slots


@pytest.mark.parametrize("share", SHARES)
def test_change_of_topic_is_followed(share: float) -> None:
    """By the end of the second topic as much hits as by the end of the first."""
    trace = topics(num_layers=3, num_steps=400, length=200)
    policy = SlotPolicy(slots(trace, share))
    hits = [run_step(policy, step) for step in trace.steps]
    assert sum(hits[300:400]) >= 0.97 * sum(hits[100:200])


@pytest.mark.parametrize("share", SHARES)
def test_wide_extends_do_not_sweep_out_what_decode_uses(share: float) -> None:
    beside = mixed(num_layers=3, num_steps=400)
    alone = Trace(
        "alone",
        beside.num_experts,
        [step for step, counted in zip(beside.steps, beside.is_counted, strict=True) if counted],
        [True] * sum(beside.is_counted),
    )
    num_slots = slots(beside, share)
    assert replay(beside, num_slots) >= 0.97 * replay(alone, num_slots)
    assert replay(beside, num_slots) >= 0.99 * replay_lru(beside, num_slots)


def run_step(policy: SlotPolicy, step: list[list[int]]) -> int:
    hits = sum(len(policy.resolve(layer, experts).hits) for layer, experts in enumerate(step))
    policy.end_step()
    return hits


def test_stack_trace_has_the_depths_it_was_asked_for() -> None:
    trace = lru_stack(num_layers=1, num_steps=600)
    for share, expected in ((16 / 128, 0.66), (32 / 128, 0.84), (48 / 128, 0.92)):
        hits = replay_lru(trace, round(share * 128)) / trace.num_lookups
        # A step's experts all differ, so that deeper ones are drawn a little more often.
        assert expected - 0.1 < hits < expected + 0.01


def test_recording_is_split_into_conversations(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    saved = Recording(9, [rng.integers(0, 9, (n, 2, 3)).astype(np.uint8) for n in (4, 2, 5, 3, 1)])
    save_recording(tmp_path / "routing.npz", saved)
    loaded = load_recording(tmp_path / "routing.npz")
    assert loaded.num_experts == 9
    for ours, theirs in zip(loaded.conversations, saved.conversations, strict=True):
        assert np.array_equal(ours, theirs)
    one, two = recorded(loaded), recorded(loaded, rows=2)
    assert len(one.steps) == 15
    assert one.steps[4][1] == sorted(set(saved.conversations[1][0, 1].tolist()))
    assert len(two.steps) == 2 + 3
    both = [*saved.conversations[2][1, 0].tolist(), *saved.conversations[3][1, 0].tolist()]
    assert two.steps[3][0] == sorted(set(both))


def test_same_seed_gives_the_same_trace() -> None:
    assert lru_stack(2, 5, seed=3, rows=2) == lru_stack(2, 5, seed=3, rows=2)
    assert lru_stack(2, 5, seed=3).steps != lru_stack(2, 5, seed=4).steps
    random.seed(1)
    assert topics(2, 5, seed=3) == topics(2, 5, seed=3)


def test_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    small = ["--layers", "2", "--steps", "40", "--slots", "25", "--json", str(output)]
    assert main([*small, "--traces", "uniform", "lru-stack", "cyclic", "topics", "mixed"]) == 0
    table = capsys.readouterr().out
    rows = json.loads(output.read_text())
    assert len(rows) == 6
    for row in rows:
        assert row["trace"] in table
        assert row["policy"] + row["misses"] == row["num_lookups"]
        assert row["policy"] <= row["optimum"]
        assert row["lru"] <= row["optimum"]
        assert row["num_slots"] == 64


def test_missing_recording_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.npz"
    assert main(["--traces", "recorded", "--recording", str(missing)]) == 1
    assert capsys.readouterr().err.startswith(f"replay_policy: error: {missing}: ")
    assert replay_policy.RECORDING.stat().st_size < 300_000
