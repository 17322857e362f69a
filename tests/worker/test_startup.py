"""What a start decides for a GPU, on fakes: experts, limits, slots at last."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest
import torch

from freetoken.config import Config
from freetoken.errors import ConfigError, EngineError
from freetoken.experts.cost import Link
from freetoken.worker import startup as subject
from freetoken.worker.device import MemoryReading
from freetoken.worker.graphs import StepGraphs
from freetoken.worker.link import Progress
from freetoken.worker.memory import plan_memory
from freetoken.worker.runner import Runner
from freetoken.worker.sizes import make_request
from freetoken.worker.startup import choose_experts, grow_slots, make_limits, make_threshold
from tests.worker.fakes import HashModel, HashSource, expected_next, fake_sizes
from tests.worker.plans import start_plan, tokens_of

GIB = 1 << 30
MIB = 1 << 20
LINK = Link(copy_bytes_s=50e9, gather_bytes_s=45e9)
MOE = {
    "on_gpu": True,
    "num_moe_layers": 8,
    "num_experts": 64,
    "top_k": 4,
    "expert_bytes": 4 * MIB,
    "expert_width": 64,
}
DENSE = {"on_gpu": True}


class Grown(HashModel):
    """Notes the slots it is given."""

    num_slots = None

    def resize_slots(self, num_slots):
        self.num_slots = num_slots


class Reading:
    """A GPU on which steps have left `spare` bytes beside a margin of 256 MiB."""

    def __init__(self, spare):
        self._free = spare + 256 * MIB

    def read(self):
        return MemoryReading(self._free, 0, 0, 0)

    def restart_peak(self):
        pass

    def peak(self):
        return 0


class GpuSource(HashSource):
    """Sizes are a GPU's; what is done to the model is noted in `events`."""

    is_full = False

    def __init__(self, events, can_capture=True, **sizes):
        model = NotingModel(events, can_capture)
        super().__init__(model, **DENSE, element_bytes=4, **sizes)
        self.events = events

    def load(self, *arguments):
        self.events.append("load")
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().load(*arguments)


class NotingModel(Grown):
    device, bank_rows = torch.device("cpu"), None

    def __init__(self, events, can_capture):
        super().__init__()
        self.events, self.can_capture = events, can_capture

    def compile(self):
        self.events.append("compile")

    def fill_slots(self):
        self.events.append("fill")

    def _run(self, ids, context, logits_at):
        self.events.append("step")
        return super()._run(ids, context, logits_at)


@pytest.fixture
def start_on_gpu(monkeypatch):
    """`start` with a GPU that is none: (started, events in order, each once in a row)."""

    def start(can_capture=True, **options):
        events = []
        monkeypatch.setattr(subject, "DeviceMemory", lambda device: Reading(0))
        monkeypatch.setattr(subject, "measure_gpu_budget", lambda device: GIB)
        monkeypatch.setattr(subject, "measure_link", lambda *_: events.append("link") or LINK)
        monkeypatch.setattr(subject, "Runner", partial(Runner, queues_steps=True))
        monkeypatch.setattr(StepGraphs, "capture", lambda self, report: events.append("capture"))
        config = Config(model="tiny", page_size=4, max_rows=4, num_pages=64, **options)
        source = GpuSource(events, can_capture)
        started = subject.start(config, source, Progress(), 4 * GIB)
        return started, [event for event, _ in groupby(events)]

    return start


def planned(config, sizes, budget=4 * GIB):
    request = make_request(config, sizes, has_slots=choose_experts(config, sizes) == "slots")
    return plan_memory(sizes, request, budget)


@pytest.mark.parametrize(
    ("sizes", "option", "expected"),
    [
        (MOE, "auto", "slots"),
        (MOE, "slots", "slots"),
        (DENSE, "auto", "in-place"),
        ({}, "auto", "in-place"),
        ({}, "slots", "slots"),
    ],
)
def test_experts_are_computed_from_slots_on_a_gpu_where_there_are_any(sizes, option, expected):
    assert choose_experts(Config(experts=option), fake_sizes(**sizes)) == expected


def test_experts_in_place_are_refused_on_a_gpu():
    with pytest.raises(ConfigError, match="in-place is for models on the CPU"):
        planned(Config(experts="in-place"), fake_sizes(**MOE))


@pytest.mark.parametrize("sizes", [MOE, DENSE])
def test_a_gpu_has_small_steps_on_demand_and_passes_in_large_chunks(sizes):
    config, sizes = Config(), fake_sizes(**sizes, window=65536)
    plan = planned(config, sizes)
    limits = make_limits(config, sizes, plan, choose_experts(config, sizes))
    assert limits.max_step_tokens == plan.max_on_demand_tokens == 256
    assert limits.chunk_tokens == plan.max_step_tokens > 256
    assert limits.max_pass_tokens >= limits.chunk_tokens
    assert limits.max_on_demand_tokens is not None, "there are passes"


def test_a_start_on_a_gpu_compiles_captures_and_then_warms_up_passes(start_on_gpu):
    started, events = start_on_gpu()
    assert events == ["load", "link", "compile", "step", "capture", "step", "fill"]
    ready = started.ready
    assert ready.max_step_tokens == 256
    assert 1 <= ready.max_on_demand_tokens <= 256
    assert ready.num_layers == 4
    result = started.runner.execute(start_plan(0, [1, 2, 3], 0))
    assert tokens_of(result) == {0: expected_next([1, 2, 3])}
    assert result.max_on_demand_tokens == ready.max_on_demand_tokens


@pytest.mark.parametrize("options", [{"compile": "off"}, {"can_capture": False}])
def test_without_compilation_or_pinned_banks_steps_run_as_they_are(start_on_gpu, options):
    started, events = start_on_gpu(**options)
    assert "capture" not in events
    assert ("compile" in events) == ("can_capture" in options)
    result = started.runner.execute(start_plan(0, [1, 2, 3], 0))
    assert tokens_of(result) == {0: expected_next([1, 2, 3])}


def test_a_gpu_that_is_full_after_all_ends_the_start_with_what_was_being_done(
    start_on_gpu, monkeypatch
):
    monkeypatch.setattr(GpuSource, "is_full", True)
    with pytest.raises(EngineError, match=r"ran out while loading weights: CUDA out of memory"):
        start_on_gpu()


def test_a_gpu_that_is_full_when_slots_grow_ends_the_start_likewise(start_on_gpu, monkeypatch):
    def grow(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(subject, "grow_slots", grow)
    with pytest.raises(EngineError, match=r"ran out while making room for more experts: CUDA"):
        start_on_gpu()


@pytest.mark.parametrize("name", ["graphs", "pass", "kv_reach", "sampling"])
def test_what_the_first_steps_do_not_take_stays_free_for_later_ones(name):
    config, sizes, model = Config(), fake_sizes(**MOE), Grown()
    plan = replace(planned(config, sizes), num_slots=100, prices={name: 20 * MIB, "kv": 30 * MIB})
    assert grow_slots(config, sizes, plan, model, Reading(61 * MIB)).num_slots == 110


def test_slots_that_do_not_grow_after_all_are_as_many_as_planned():
    class Full(Grown):
        def resize_slots(self, num_slots):
            super().resize_slots(num_slots)
            if num_slots > 100:
                raise torch.OutOfMemoryError("CUDA out of memory: holes")

    config, sizes, model = Config(), fake_sizes(**MOE), Full()
    plan = replace(planned(config, sizes), num_slots=100)
    assert grow_slots(config, sizes, plan, model, Reading(GIB)) is plan
    assert model.num_slots == 100


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
    ],
)
def test_a_model_that_graphs_cannot_hold_is_served_without_them(
    start_on_gpu, monkeypatch, error, is_fatal
):
    def capture(self, report):
        raise error

    monkeypatch.setattr(Runner, "capture", capture)
    if is_fatal:
        with pytest.raises(EngineError, match="ran out while capturing CUDA graphs"):
            start_on_gpu()
        return
    started, events = start_on_gpu()
    assert events[-1] == "fill"
    assert tokens_of(started.runner.execute(start_plan(0, [1, 2], 0))) == {0: expected_next([1, 2])}


@pytest.mark.parametrize(
    "option",
    [{"moe_cache_auto": True}, {"extend_threshold": 5}],
)
def test_options_about_slots_are_refused_where_there_are_none(option):
    with pytest.raises(ConfigError, match="need --experts slots"):
        choose_experts(Config(**option), fake_sizes())


def test_slots_take_what_is_left_after_the_first_steps():
    config, sizes, model = Config(), fake_sizes(**MOE), Grown()
    plan = replace(planned(config, sizes), num_slots=100, prices={"graphs": 20 * MIB})
    grown = grow_slots(config, sizes, plan, model, Reading(61 * MIB))
    assert grown.num_slots == model.num_slots == 110
    assert grown.prices["slots"] == 110 * sizes.expert_bytes
    assert grown.resident_rate == pytest.approx(110 / 512)


def test_slots_are_never_more_than_experts_and_never_fewer_than_planned():
    config, sizes = Config(), fake_sizes(**MOE)
    plan = replace(planned(config, sizes), num_slots=500)
    model = Grown()
    assert grow_slots(config, sizes, plan, model, Reading(100 * GIB)).num_slots == 512
    for spare in (0, 3 * MIB):
        model = Grown()
        assert grow_slots(config, sizes, plan, model, Reading(spare)) is plan
        assert model.num_slots is None


@pytest.mark.parametrize("flag", [{"moe_cache_size": 50}, {"moe_cache_rate": 0.1}])
def test_slots_that_were_asked_for_stay_as_many(flag):
    config, sizes, model = Config(**flag), fake_sizes(**MOE), Grown()
    plan = planned(config, sizes)
    assert grow_slots(config, sizes, plan, model, Reading(GIB)) is plan
    assert model.num_slots is None


@pytest.mark.parametrize(("option", "expected"), [(0, 0), (17, 17)])
def test_a_given_threshold_is_taken_as_it_is(option, expected):
    config, sizes = Config(extend_threshold=option), fake_sizes(**MOE)
    threshold = make_threshold(config, sizes, planned(config, sizes), LINK)
    assert threshold.tokens == expected


def test_a_threshold_that_no_step_on_demand_reaches_is_warned_of(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("freetoken"), "propagate", True)
    config, sizes = Config(extend_threshold=5000), fake_sizes(**MOE)
    threshold = make_threshold(config, sizes, planned(config, sizes), LINK)
    assert f"at most {threshold.tokens} new tokens" in caplog.text


@pytest.mark.parametrize("sizes", [MOE, DENSE])
def test_a_threshold_is_found_from_the_link_and_within_the_largest_step(sizes):
    config, sizes = Config(), fake_sizes(**sizes)
    threshold = make_threshold(config, sizes, planned(config, sizes), LINK)
    assert 1 <= threshold.tokens <= 256
