"""Reads a checkpoint's tensors into weights and banks, in several threads.

What is in flight is bounded, so a load never holds more than the banks, the dense weights and about
a shard. transformers' bulk loader would queue every tensor and stack whole layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from freetoken.experts.shared import BankMemory
from freetoken.model.assemble import Weights
from freetoken.model.conversion import LoadPlan, Task
from freetoken.model.filler import Filler
from freetoken.model.heap import trim_heap
from freetoken.model.tensors import TensorReader

Progress = Callable[[str, int, int], None]
MAX_FLIGHT_BYTES = 512 << 20
"""Of tensors being read and converted; a larger tensor goes alone."""
PIECE_BYTES = 32 << 20
"""Of a tensor with all experts of a layer, what one thread takes at a time."""
TRIM_BYTES = 256 << 20
"""Converted tensors live between banks and are freed at once; glibc keeps the holes."""
MIN_THREADS, MAX_THREADS = 4, 16
"""A disk likes several reads at a time, whatever the cores."""
MAX_FLYING = 2 * MAX_THREADS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A task, or of a tensor with all experts some of them."""

    task: Task
    experts: range | None
    num_bytes: int

    @property
    def layer(self) -> str | None:
        """The experts module it is part of."""
        return None if self.task.bank is None else self.task.bank.module_name


def fill_weights(
    plan: LoadPlan,
    model: PreTrainedModel,
    weights: Weights,
    memory: BankMemory | None,
    progress: Progress,
    on_filled: Callable[[int], None] = lambda layer: None,
) -> int:
    """Read everything but the layers that `memory` holds already; a layer that is complete is
    marked there. Returns the bytes read.

    `progress(what, done, total)`: in bytes · `on_filled(layer)`: a layer has just been marked.
    Raises ConfigError for a checkpoint that is damaged, EngineError where memory is short.
    """
    names = [] if memory is None else [layer.name for layer in memory.identity.layers]
    layers = {name: i for i, name in enumerate(names) if memory and not memory.is_filled(i)}
    kept = set(names) - set(layers)
    pieces = [piece for task in plan.tasks for piece in _pieces(task) if piece.layer not in kept]
    left = Counter(piece.layer for piece in pieces)
    done, total, untrimmed = 0, sum(piece.num_bytes for piece in pieces), 0
    progress("loading", 0, total)
    with TensorReader() as reader, _threads() as threads, _reserving(memory, layers) as reserved:
        filler = Filler(model, weights, reader)

        def fill(piece: _Piece) -> None:
            if piece.layer in reserved:
                reserved[piece.layer].result()
            filler.fill(piece.task, piece.experts)

        for piece in _run(threads, fill, ((piece, piece.num_bytes) for piece in pieces)):
            left[piece.layer] -= 1
            if memory is not None and piece.layer in layers and not left[piece.layer]:
                memory.mark_filled(layers[piece.layer])
                on_filled(layers[piece.layer])
            untrimmed += piece.num_bytes
            if untrimmed >= TRIM_BYTES:
                trim_heap()
                untrimmed = 0
            done += piece.num_bytes
            progress("loading", done, total)
    return total


def _pieces(task: Task) -> Iterator[_Piece]:
    """Whole tasks; a tensor that stacks all experts in ranges of experts."""
    bank = task.bank
    sources = [stored for group in task.sources.values() for stored in group]
    if bank is None or task.expert is not None or not bank.num_experts:
        yield _Piece(task, None, task.num_bytes)
        return
    if any(stored.shape[:1] != (bank.num_experts,) for stored in sources):
        yield _Piece(task, None, task.num_bytes)
        return
    expert_bytes = task.num_bytes // bank.num_experts
    step = max(1, PIECE_BYTES // max(1, expert_bytes))
    for first in range(0, bank.num_experts, step):
        experts = range(first, min(first + step, bank.num_experts))
        yield _Piece(task, experts, len(experts) * expert_bytes)


@contextmanager
def _reserving(
    memory: BankMemory | None, layers: Mapping[str, int]
) -> Iterator[dict[str | None, Future[None]]]:
    """Takes the memory of layer after layer, ahead of those who fill them; when each is there."""
    with ThreadPoolExecutor(1, "reserve") as executor:
        reserved: dict[str | None, Future[None]] = {}
        if memory is not None:
            reserved |= {name: executor.submit(memory.reserve, i) for name, i in layers.items()}
        try:
            yield reserved
        finally:
            for future in reserved.values():
                future.cancel()


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Each computes by itself; when something fails, what has not begun is not done."""
    num_threads = torch.get_num_threads()
    executor = ThreadPoolExecutor(
        max(MIN_THREADS, min(num_threads, MAX_THREADS)), "load", lambda: torch.set_num_threads(1)
    )
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)  # the number is also what threads to come start with


def _run(
    executor: ThreadPoolExecutor, work: Callable[[T], None], items: Iterable[tuple[T, int]]
) -> Iterator[T]:
    """`work` on each (item, its bytes) in a thread; yields items as they are done.

    The first exception is raised here.
    """
    landed: SimpleQueue[tuple[T, int, BaseException | None]] = SimpleQueue()

    def fly(item: T, num_bytes: int) -> None:
        error = None
        try:
            work(item)
        except BaseException as caught:
            error = caught
        landed.put((item, num_bytes, error))

    num_flying = flying_bytes = 0
    todo = iter(items)
    following = next(todo, None)
    while following is not None or num_flying:
        while following is not None and (
            not num_flying
            or (num_flying < MAX_FLYING and flying_bytes + following[1] <= MAX_FLIGHT_BYTES)
        ):
            executor.submit(fly, *following)
            num_flying += 1
            flying_bytes += following[1]
            following = next(todo, None)
        item, num_bytes, error = landed.get()
        num_flying -= 1
        flying_bytes -= num_bytes
        if error is not None:
            raise error
        yield item
