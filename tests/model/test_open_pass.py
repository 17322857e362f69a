"""What the thread of a pass has of its owner's."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
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


@pytest.mark.parametrize("ends", ["fails", "is closed"])
def test_what_a_pass_held_is_free_when_it_ends_before_its_end(ends: str) -> None:
    """The next try has smaller chunks, but no more memory than this one leaves."""
    held: list[weakref.ref[torch.Tensor]] = []
    runs: list[PassRun] = []

    def make_run(before_layer: BeforeLayer) -> PassRun:
        runs.append(PassRun([], PagedAttention(), None, [None] * 2, before_layer))
        return runs[0]

    def forward() -> torch.Tensor:
        tensor = torch.zeros(1)
        held.append(weakref.ref(tensor))
        for layer in range(2):
            runs[0].enter_layer(layer)
        raise torch.OutOfMemoryError(f"no memory beside {tensor}")

    running = OpenPass(make_run, forward, torch.device("cpu"), lambda: None, PassThread())
    gc.disable()
    try:
        assert not running.advance(1)
        if ends == "is closed":
            running.close()
        else:
            with suppress(torch.OutOfMemoryError):
                running.advance()
        for _ in range(100):  # the thread may be on its way out of the job
            if held[0]() is None:
                break
            threading.Event().wait(0.01)
        assert held[0]() is None
    finally:
        gc.enable()
