"""What the thread of a pass has of its owner's."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import pytest
import torch

from freetoken.model.attention import PagedAttention
from freetoken.model.open_pass import BeforeLayer, OpenPass, PassThread
from freetoken.model.passes import PassRun

setting: ContextVar[str] = ContextVar("setting", default="none")


def open_pass(num_layers: int, seen: list[object]) -> OpenPass:
    runs: list[PassRun] = []

    def make_run(before_layer: BeforeLayer) -> PassRun:
        layers = [None] * num_layers
        runs.append(PassRun([], PagedAttention(), None, layers, before_layer))
        return runs[0]

    def forward() -> torch.Tensor:
        for layer in range(num_layers):
            runs[0].enter_layer(layer)
            state = (setting.get(), torch.is_inference_mode_enabled(), torch.get_num_threads())
            seen.append(state)
        return torch.zeros(1)

    ended = partial(seen.append, "ended")
    return OpenPass(make_run, forward, torch.device("cpu"), ended, PassThread())


def test_thread_computes_in_inference_mode_with_its_owners_settings() -> None:
    seen: list[object] = []
    token = setting.set("mine")
    threads = torch.get_num_threads()
    try:
        running = open_pass(2, seen)
        assert not running.advance(1)
        torch.set_num_threads(threads + 1)
        assert running.advance()
    finally:
        setting.reset(token)
        torch.set_num_threads(threads)
    assert seen == [("mine", True, threads), ("mine", True, threads + 1), "ended"]


def test_layers_run_when_they_are_asked_for() -> None:
    seen: list[object] = []
    running = open_pass(5, seen)
    assert seen == []
    assert not running.advance(2)
    assert len(seen) == 2
    assert not running.advance(2)
    assert running.advance(2), "one layer was left"
    assert len(seen) == 6
    assert running.advance(), "it stays done"
    running.close()
    assert len(seen) == 6


def test_thread_serves_all_passes_and_ends_with_their_owner() -> None:
    seen: list[threading.Thread] = []
    done = threading.Event()
    thread = PassThread()
    thread.run(lambda: seen.append(threading.current_thread()))
    thread.run(lambda: (seen.append(threading.current_thread()), done.set()))
    assert done.wait(10)
    assert seen[0] is seen[1]
    del thread
    seen[0].join(10)
    assert not seen[0].is_alive()


class _Ring(list[object]):
    """Stands for what a pass holds; a plain list takes no weak references."""


def holding_pass(held: _Ring, fails: bool) -> OpenPass:
    """A pass of two layers whose forward, context and run hold `held`."""
    runs: list[PassRun] = []

    def make_run(before_layer: BeforeLayer) -> PassRun:
        runs.append(PassRun([], PagedAttention(), None, [None, None], before_layer))
        held.append(runs[0])
        return runs[0]

    def forward() -> torch.Tensor:
        hidden = held
        for layer in range(2):
            runs[0].enter_layer(layer)
        if fails:
            raise torch.OutOfMemoryError(f"{len(hidden)} tensors")
        return torch.zeros(1)

    return OpenPass(make_run, forward, torch.device("cpu"), lambda: None, PassThread())


def fail(running: OpenPass) -> None:
    assert not running.advance(1)
    with pytest.raises(torch.OutOfMemoryError):
        running.advance()


def give_up(running: OpenPass) -> None:
    assert not running.advance(1)
    running.close()


def finish(running: OpenPass) -> None:
    assert running.advance()


@pytest.mark.parametrize("end", [fail, give_up, finish])
def test_what_a_pass_has_held_is_free_when_it_is_over(end: Callable[[OpenPass], None]) -> None:
    """At once, and not when garbage is collected: with less memory it is tried again."""
    held = _Ring()
    seen = weakref.ref(held)
    running = holding_pass(held, end is fail)
    del held
    gc.disable()
    try:
        end(running)
        assert _dies(seen)
    finally:
        gc.enable()


def _dies(reference: weakref.ref[_Ring]) -> bool:
    """The pass's thread lets go a moment after it has reported."""
    deadline_s = time.monotonic() + 5
    while reference() is not None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return reference() is None
