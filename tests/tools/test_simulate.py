"""The simulator: its clock, its costs and its figures, on loads small enough to work out."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from freetoken.experts.cost import Link, Machine, Routed, pass_s
from freetoken.scheduler.pace import Fairness
from freetoken.wire.messages import Extend, StepMode, StepPlan, pack_ids
from freetoken.worker.threshold import PASS_LAYER_S
from tools.sim_traces import Conversation, Load, Turn, make_trace
from tools.sim_worker import QWEN3_30B_A3B, CostedWorker, Rig, hit_rate
from tools.simulate import POLICIES, main, percentile, report
from tools.simulation import Policy, Seats, Simulation
from tools.svg_plot import Panel, Series, cumulative, draw

WORK = replace(QWEN3_30B_A3B, routed=Routed(4, 16, 2, 1_000_000))
RIG = Rig(WORK, Machine(Link(1e9, 0.9e9), 100e9, 100e12), 0.5)
SEATS = Seats(pool_tokens=4096, max_rows=4)
CHUNKS = Policy("chunks", "", max_pass_tokens=100, extend_threshold=0)
PASSES = Policy("passes", "", max_pass_tokens=1000)
BANK_S = 0.5 * 4 * 16 * 1e6 / 1e9 + 4 * PASS_LAYER_S
"""All missing experts over the link, behind which so few tokens compute."""


def simulate(trace: list[Conversation], policy: Policy, seats: Seats = SEATS) -> Simulation:
    run = Simulation(trace, RIG, seats, policy, seed=1)
    run.run()
    return run


def talk(*turns: Turn, start_s: float = 0.0, prefix_tokens: int = 10) -> Conversation:
    return Conversation("chat", start_s, 0, prefix_tokens, turns)


def make_plan(
    mode: StepMode,
    extends: tuple[tuple[int, int], ...] = (),
    positions: tuple[int, ...] = (),
    layers: tuple[int, int] = (0, 0),
) -> StepPlan:
    """`extends`: cached and new tokens."""
    made = tuple(
        Extend(row, cached, pack_ids([1] * new), True) for row, (cached, new) in enumerate(extends)
    )
    rows = pack_ids(range(100, 100 + len(positions)))
    return StepPlan(1, 1, mode, b"", (), (), (), made, rows, pack_ids(positions), layers)


# ---------------------------------------------------------------- costs


def test_the_parts_of_a_pass_cost_together_what_it_costs_whole() -> None:
    whole, whole_stats = CostedWorker(RIG, 4).cost(make_plan(StepMode.PASS, ((0, 500),)))
    worker = CostedWorker(RIG, 4)
    parts = [
        worker.cost(make_plan(StepMode.PASS, ((0, 500),), layers=(0, 1))),
        worker.cost(make_plan(StepMode.PASS, ((0, 0),), layers=(1, 3))),
        worker.cost(make_plan(StepMode.PASS, ((0, 0),), layers=(3, 4))),
    ]
    assert sum(seconds for seconds, _ in parts) == pytest.approx(whole)
    assert sum(stats.expert_bytes for _, stats in parts) == whole_stats.expert_bytes == 32_000_000


def test_a_pass_takes_what_the_longer_of_copies_and_arithmetic_takes() -> None:
    short, _ = CostedWorker(RIG, 1).cost(make_plan(StepMode.PASS, ((0, 10),)))
    assert short == pytest.approx(BANK_S)
    long, _ = CostedWorker(RIG, 1).cost(make_plan(StepMode.PASS, ((0, 20_000),)))
    longer, _ = CostedWorker(RIG, 1).cost(make_plan(StepMode.PASS, ((20_000, 20_000),)))
    assert BANK_S < long < longer, "attention to what is cached costs too"
    assert pass_s(WORK.routed, RIG.machine.link, 1.0, 0.25) == 0.25


def test_more_rows_and_longer_contexts_make_a_decode_step_dearer() -> None:
    worker = CostedWorker(RIG, 1)
    costs = [
        worker.cost(make_plan(StepMode.ON_DEMAND, positions=positions))[0]
        for positions in ((10,), (10_000,), (10_000, 10_000))
    ]
    assert costs == sorted(costs)
    assert costs[0] < costs[1]


def test_rows_share_slots_so_that_each_hits_less() -> None:
    rates = [hit_rate(0.5, width) for width in (1, 2, 4, 1e6)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.5, abs=1e-3)
    _, stats = CostedWorker(RIG, 1).cost(make_plan(StepMode.ON_DEMAND, positions=(10,)))
    assert stats.slot_hits + stats.slot_misses == stats.distinct_experts == 4 * 2
    assert stats.expert_bytes == stats.slot_misses * 1_000_000


# ---------------------------------------------------------------- the clock


def test_one_request_waits_for_its_pass_and_then_for_each_step() -> None:
    [answer] = simulate([talk(Turn(90, 5, 0.0), start_s=2.0)], CHUNKS).answers
    assert answer.sent_s == 2.0
    assert answer.ttft_s == pytest.approx(BANK_S)
    worker = CostedWorker(RIG, 1)
    steps = [worker.cost(make_plan(StepMode.ON_DEMAND, positions=(p,)))[0] for p in range(100, 104)]
    assert answer.gaps_s == pytest.approx(steps)


def test_the_next_turn_comes_after_the_answer_and_finds_it_in_the_cache() -> None:
    first, second = simulate([talk(Turn(90, 5, 9.0), Turn(20, 3, 7.0))], PASSES).answers
    assert second.sent_s == pytest.approx(first.came_s[-1] + 7.0)
    assert second.prompt_tokens == 100 + 5 + 20
    assert second.cached_tokens == 100 + 4, "the last token of an answer has no k/v"


def test_conversations_with_the_same_prefix_share_it() -> None:
    talks = [talk(Turn(10, 2, 0.0), start_s=s, prefix_tokens=160) for s in (0.0, 50.0)]
    first, second = simulate(talks, PASSES).answers
    assert first.cached_tokens == 0
    assert second.cached_tokens == 160


def test_chunks_move_the_bank_for_each_chunk_and_passes_once() -> None:
    trace = [talk(Turn(490, 1, 0.0))]
    moved = [simulate(trace, policy).scheduler.counters.expert_bytes for policy in (CHUNKS, PASSES)]
    assert moved == [5 * 32_000_000, 32_000_000]


def test_pauses_shorten_the_gap_that_a_long_prompt_makes() -> None:
    trace = [talk(Turn(20, 400, 0.0)), talk(Turn(3000, 1, 0.0), start_s=0.2)]
    fairness = Fairness(max_stall_ms=15.0)
    gaps = []
    for pauses in (False, True):
        run = simulate(
            trace, replace(PASSES, max_pass_tokens=3000, pauses=pauses, fairness=fairness)
        )
        [stream] = [answer for answer in run.answers if len(answer.came_s) == 400]
        gaps.append(max(stream.gaps_s))
        assert run.scheduler.counters.expert_bytes >= 32_000_000
    whole_s, paused_s = gaps
    assert whole_s > BANK_S
    assert paused_s < whole_s / 2


def test_a_conversation_that_outgrows_the_context_ends() -> None:
    run = simulate([talk(Turn(90, 5, 0.0), Turn(500, 5, 0.0))], PASSES, Seats(400, 4))
    assert len(run.answers) == 1
    assert run.num_refused == 1


def test_the_same_seed_gives_the_same_run() -> None:
    trace = make_trace(Load(agents=1, chats=2, batch=0, duration_s=5.0), seed=3)
    small = [replace(one, prefix_tokens=50, turns=one.turns[:3]) for one in trace]
    assert make_trace(Load(1, 2, 0, 5.0), seed=3) == trace
    assert make_trace(Load(1, 2, 0, 5.0), seed=4) != trace
    runs = [simulate(small, PASSES).answers for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_answer_is_as_long_as_it_was_asked_for(policy: Policy) -> None:
    turns = [Turn(5 + 37 * i, 1 + 3 * i, 0.1) for i in range(4)]
    trace = [replace(talk(*turns, start_s=0.01 * i), kind=f"kind{i}") for i in range(6)]
    run = simulate(trace, policy)
    assert sorted(len(one.came_s) for one in run.answers) == sorted([1, 4, 7, 10] * 6)
    figures = report(run)
    assert figures["all"]["turns"] == 24
    assert figures["engine"]["output_tokens_s"] * run.now_s == pytest.approx(6 * 22)
    assert 0.4 < figures["all"]["prefix_hits"] < 0.5


# ---------------------------------------------------------------- who waits how long


@dataclass(frozen=True)
class Ran:
    """A step: when it was done, what it took, and how many layers of a pass (0: on demand)."""

    end_s: float
    ms: float
    layers: int


class Watched(Simulation):
    """Remembers its steps."""

    def __init__(self, trace: list[Conversation], rig: Rig, seats: Seats, policy: Policy) -> None:
        self.ran: list[Ran] = []
        super().__init__(trace, rig, seats, policy, seed=1)

    def _start_step(self, plan: StepPlan) -> None:
        before_s = self.busy_s
        super()._start_step(plan)
        layers = plan.layers[1] - plan.layers[0]
        self.ran.append(Ran(self._free_s, 1e3 * (self.busy_s - before_s), layers))

    def between(self, first_s: float, last_s: float) -> list[Ran]:
        """The steps that ended in `(first_s, last_s]`."""
        ends = [one.end_s for one in self.ran]
        return self.ran[bisect_right(ends, first_s) : bisect_right(ends, last_s)]


def assert_gaps_are_bounded(run: Watched, max_stall_ms: float) -> None:
    """Each is one on-demand step, which brings the token, and before it at most one part, within
    the limit or a single layer."""
    for answer in run.answers:
        for gap in pairwise(answer.came_s):
            *before, last = run.between(*gap)
            assert not last.layers
            assert len(before) <= 1
            for part in before:
                assert part.layers == 1 or 0 < part.ms <= max_stall_ms


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_waits_for_one_part_within_the_limit_and_one_on_demand_step(seed: int) -> None:
    random = Random(seed)
    link = random.choice([12e9, 50e9, 200e9])
    machine = Machine(Link.of_copy(link), 1200e9, random.choice([20e12, 120e12, 800e12]))
    rig = Rig(QWEN3_30B_A3B, machine, random.choice([0.1, 0.45, 0.8]))
    fairness = Fairness(random.choice([30.0, 250.0, 1000.0]), random.choice([0.0, 0.2, 0.8]))
    policy = replace(POLICIES[2], fairness=fairness, extend_threshold=random.choice([None, 0, 9]))
    load = Load(random.randint(0, 2), random.randint(2, 5), random.randint(1, 3), 20.0)
    seats = Seats(262_144, random.choice([4, 32]))
    run = Watched(make_trace(load, seed), rig, seats, policy)
    run.run()
    assert run.scheduler.counters.preemptions == 0, "who is preempted waits for pages"
    assert any(one.layers for one in run.ran)
    assert_gaps_are_bounded(run, fairness.max_stall_ms)


def test_a_stream_a_very_long_prompt_and_a_late_short_one() -> None:
    """Qwen3-30B-A3B on a card of 48 GB: the stream goes on, the late one is served first, and all
    together take no more than without pauses, give or take a fifth."""
    machine = Machine(Link.of_copy(50e9), 1200e9, 120e12)
    rig, seats = Rig(QWEN3_30B_A3B, machine, 0.45), Seats(131_072, 32)
    talks = [
        replace(talk(Turn(100, 400, 0.0), prefix_tokens=0), kind="stream"),
        replace(talk(Turn(32_000, 10, 0.0), start_s=2.0, prefix_tokens=0), kind="long"),
        replace(talk(Turn(10, 10, 0.0), start_s=2.3, prefix_tokens=0), kind="late"),
    ]
    runs = {}
    for policy in POLICIES[1:]:
        runs[policy.name] = run = Watched(talks, rig, seats, policy)
        run.run()
    whole, paused = runs["passes"], runs["paused"]
    came = {answer.kind: answer.came_s for answer in paused.answers}
    assert came["late"][0] < came["long"][0]
    assert_gaps_are_bounded(paused, 250.0)
    late = next(one for one in paused.answers if one.kind == "late")
    assert late.ttft_s < 2 * 0.25 + 0.4, "the parts in flight, and its own step"
    slowest_s = max(b - a for a, b in pairwise(came["stream"]))
    longest_step_s = max(one.ms for one in paused.ran if not one.layers) / 1e3
    assert slowest_s <= 0.25 + longest_step_s
    assert paused.now_s <= whole.now_s / 0.8, "the same tokens in the time that all take"


# ---------------------------------------------------------------- traces, figures, plots


def test_a_trace_has_what_was_asked_for_in_order_and_within_its_time() -> None:
    trace = make_trace(Load(agents=3, chats=5, batch=2, duration_s=60.0), seed=1)
    kinds = [one.kind for one in trace]
    assert [kinds.count(kind) for kind in ("agent", "chat", "batch")] == [3, 5, 2]
    starts = [one.start_s for one in trace]
    assert starts == sorted(starts)
    assert 0 <= starts[0] < starts[-1] < 60
    assert all(turn.new_tokens > 0 and turn.output_tokens > 0 for t in trace for turn in t.turns)


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.5, 0.9, 1.0)] == [1, 1, 3, 5, 5]
    assert math.isnan(percentile([], 0.5))


def test_a_plot_is_well_formed_and_holds_its_names() -> None:
    points = cumulative([0.03, 0.5, 12.0])
    assert points[0] == (0.03, 0.0)
    assert points[-1] == (12.0, 1.0)
    text = draw([Panel("A < B", "x", [Series("one", points), Series("none", [])])], "a note")
    root = ElementTree.fromstring(text)
    words = {element.text for element in root.iter() if element.text}
    assert {"A < B", "one", "a note", "0.01", "100"} <= words


def test_the_command_compares_policies_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, figures = tmp_path / "plot.svg", tmp_path / "figures.json"
    load = ["--agents", "1", "--chats", "2", "--batch", "1", "--duration-s", "20"]
    main([*load, "--plot", str(plot), "--json", str(figures)])
    printed = capsys.readouterr().out
    written = json.loads(figures.read_text())
    assert written.keys() == {policy.name for policy in POLICIES}
    assert all(policy.title in printed for policy in POLICIES)
    assert written["passes"]["engine"]["expert_gb"] < written["chunks"]["engine"]["expert_gb"]
    assert plot.read_text().startswith("<svg")
