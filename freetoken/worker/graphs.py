"""On-demand steps on the device: what they are told, one CUDA graph for each number of tokens.

A step reads its inputs from one static buffer, runs the forward, draws one token for each sampled
row, keeps it for the row's next step, and leaves tokens and counters in another static buffer. As
that never asks the host anything, it is captured once for each bucket of token numbers and
replayed. Larger steps, and all steps where graphs cannot be had, run the same function as it
stands. Nothing here waits for the device, so several steps can be queued.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freetoken.kernels.sample_ops import sample
from freetoken.model.context import KvPools, Segment, StepContext
from freetoken.worker.batch import pieces_of, segments_of
from freetoken.worker.faults import PieceSize, StepError, memory_message
from freetoken.worker.inputs import FROM_ROW, DeviceInputs, HostInputs, InputLayout, fill
from freetoken.worker.model import Model
from freetoken.worker.rows import Ids, Rows, Work
from freetoken.worker.sampler import LogprobTensors, Sampled, Sampler

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of the steps that have graphs: those that launching kernels would hold up."""
NUM_STEP_COUNTERS = 4
NUM_COUNTERS = NUM_STEP_COUNTERS + 1
"""Those of steps on demand, and the distinct experts of passes."""


@contextmanager
def _left_as_it_was(pool: Any) -> Iterator[None]:
    """After a capture that fails, the current stream and where memory is taken from: torch's own
    context undoes neither. RuntimeError, too, if the device is lost."""
    stream = torch.cuda.current_stream()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch.cuda.synchronize()
        raise


def buckets_up_to(num_tokens: int) -> tuple[int, ...]:
    """The buckets needed for steps of up to `num_tokens` tokens."""
    return BUCKETS[: bisect.bisect_left(BUCKETS, num_tokens) + 1]


class _Seat:
    """Host memory of one step in flight: its inputs, and what came of it."""

    def __init__(self, num_bytes: int, num_outputs: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.inputs = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
        self.outputs = torch.empty(num_outputs, dtype=torch.int64, pin_memory=pin)
        self.event = torch.cuda.Event() if pin else None
        self._bytes = self.inputs.numpy()
        self._views: dict[InputLayout, HostInputs] = {}

    def view(self, layout: InputLayout) -> HostInputs:
        """The views of a bucket are made once, those of other sizes each time."""
        views = self._views.get(layout)
        if views is None:
            views = layout.view_host(self._bytes)
            if layout.num_tokens in BUCKETS:
                self._views[layout] = views
        return views


@dataclass(slots=True)
class Enqueued:
    """A step on its way through the device. `row_ids`: the sampled rows, in order."""

    row_ids: Ids
    logprobs: LogprobTensors | None
    _seat: _Seat
    _give_back: Callable[[_Seat], None]

    def is_done(self) -> bool:
        return self._seat.event is None or self._seat.event.query()

    def read(self) -> tuple[Ids, Ids]:
        """([n] tokens, -1 where nothing could be drawn; [5] counters up to here). Once; waits."""
        if self._seat.event is not None:
            self._seat.event.synchronize()
        outputs = self._seat.outputs[: NUM_COUNTERS + len(self.row_ids)].numpy().copy()
        self._give_back(self._seat)
        return outputs[NUM_COUNTERS:], outputs[:NUM_COUNTERS]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """`buffer`: the part of the static buffer that `inputs` are views of."""

    layout: InputLayout
    buffer: Tensor
    inputs: DeviceInputs
    graph: torch.cuda.CUDAGraph | None = None


class StepGraphs:
    """Steps of up to `max_tokens` tokens, decode rows included. On a CPU they are computed at once,
    without graphs."""

    def __init__(
        self,
        model: Model,
        pools: KvPools,
        rows: Rows,
        sampler: Sampler,
        piece: PieceSize,
        *,
        max_tokens: int,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._pools = pools
        self._rows = rows
        self._sampler = sampler
        self._piece = piece
        self._device = rows.last_tokens.device
        layouts = [self._layout(count) for count in buckets_up_to(max_tokens)]
        self._num_bytes = max(self._layout(max_tokens).num_bytes, layouts[-1].num_bytes)
        num_samples = min(max_tokens, rows.max_rows)
        num_outputs = NUM_COUNTERS + num_samples
        self._buffer = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        self._outputs = torch.zeros(num_outputs, dtype=torch.int64, device=self._device)
        self._logits = torch.zeros((num_samples, vocab_size), device=self._device)
        self._buckets = [self._place(layout) for layout in layouts]
        self._seats: list[_Seat] = []

    @torch.inference_mode()
    def capture(self, report: Callable[[int, int], None]) -> None:
        """Record the graph of each bucket, largest first, in one memory pool; CUDA only.

        RuntimeError for a model whose code asks the device something; after that its steps can be
        run as they are. report(done, total). No step may be in flight.
        """
        pool = torch.cuda.graph_pool_handle()
        total = len(self._buckets)
        for i in reversed(range(total)):
            report(total - 1 - i, total)
            bucket = self._buckets[i]
            self._buffer.zero_()  # no token: nothing is routed, written or fetched
            bucket.inputs.sampled_rows.fill_(self._rows.max_rows)
            self._run(bucket.inputs, ())  # compiles what this number of tokens needs
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with (
                _left_as_it_was(pool),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                self._run(bucket.inputs, ())
            self._buckets[i] = replace(bucket, graph=graph)
        report(total, total)

    def drop(self) -> None:
        """Run steps as they are."""
        self._buckets = [replace(bucket, graph=None) for bucket in self._buckets]

    def enqueue(self, work: Work) -> list[Enqueued]:
        """Queue a step of at least one token, in smaller pieces if memory is short."""
        parts, todo = [], deque(pieces_of(work, self._piece.num_tokens))
        while todo:
            piece = todo.popleft()
            try:
                parts.append(self._enqueue(piece))
                continue
            except (RuntimeError, MemoryError) as error:
                message = memory_message(error)
            self._piece.shrink(piece.num_tokens, message)
            rest = (piece, *todo)
            todo = deque(part for work in rest for part in pieces_of(work, self._piece.num_tokens))
        return parts

    def enqueue_drawn(self, row_ids: Ids, sampled: Sampled | None) -> Enqueued:
        """Queue the way home of what a pass has drawn; None: it goes on."""
        if sampled is not None:
            self._take(row_ids, sampled)
        # A pass leaves them alone, but others may have changed them since the last step.
        self._count()
        distinct = self._model.pass_distinct
        if distinct is not None:
            self._outputs[NUM_STEP_COUNTERS:NUM_COUNTERS].copy_(distinct)
        logprobs = None if sampled is None else sampled.logprobs
        return self._send(row_ids, logprobs, self._take_seat())

    # ---- inside

    def _run(self, inputs: DeviceInputs, segments: tuple[Segment, ...]) -> None:
        """What the graphs hold."""
        last_tokens = self._rows.last_tokens
        ids = torch.where(inputs.given == FROM_ROW, last_tokens[inputs.rows], inputs.given)
        context = StepContext(
            positions=inputs.positions,
            rows=inputs.rows,
            page_table=self._rows.pages.device,
            segments=segments,
            pools=self._pools,
            num_tokens=inputs.num_tokens,
        )
        logits = self._logits[: len(inputs.logits_at)]
        logits.copy_(self._model.forward(ids, context, inputs.logits_at))
        tokens = sample(
            logits,
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.min_p,
            inputs.uniforms,
        )
        last_tokens.index_copy_(0, inputs.sampled_rows, tokens.clamp(min=0))
        self._outputs[NUM_COUNTERS : NUM_COUNTERS + len(tokens)].copy_(tokens)
        self._count()

    def _count(self) -> None:
        counters = self._model.counters
        if counters is not None:
            self._outputs[:NUM_STEP_COUNTERS].copy_(counters)

    def _enqueue(self, work: Work) -> Enqueued:
        row_ids = work.sampled_rows()
        bucket = self._find(work.num_tokens)
        # After an error the seat is not used again: its copy to the device may be still to come.
        seat = self._take_seat()
        host = seat.view(bucket.layout)
        draws = self._sampler.read(row_ids)
        fill(host, work, row_ids, draws, padding_row=self._rows.max_rows)
        bucket.buffer.copy_(seat.inputs[: len(bucket.buffer)], non_blocking=True)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            # A GPU's kernels find a token's row by the tensors alone.
            on_cpu = self._device.type == "cpu"
            self._run(bucket.inputs, segments_of(work) if on_cpu else ())
        return self._send(row_ids, self._draw_again(row_ids), seat)

    def _draw_again(self, row_ids: Ids) -> LogprobTensors | None:
        """Where the kernel is not enough: draw from the logits that the step has left."""
        if not self._sampler.needs_logits(row_ids):
            self._sampler.advance(row_ids)
            return None
        try:
            sampled = self._sampler.sample(row_ids, self._logits[: len(row_ids)])
        except (RuntimeError, MemoryError) as error:
            # The step cannot be tried again: its rows have other last tokens now.
            raise StepError(f"out of memory in sampling: {memory_message(error)}") from error
        self._take(row_ids, sampled)
        return sampled.logprobs

    def _take(self, row_ids: Ids, sampled: Sampled) -> None:
        self._rows.keep_tokens(row_ids, sampled.tokens)
        self._outputs[NUM_COUNTERS : NUM_COUNTERS + len(row_ids)].copy_(sampled.tokens)

    def _send(self, row_ids: Ids, logprobs: LogprobTensors | None, seat: _Seat) -> Enqueued:
        count = NUM_COUNTERS + len(row_ids)
        seat.outputs[:count].copy_(self._outputs[:count], non_blocking=True)
        if seat.event is not None:
            seat.event.record()
        return Enqueued(row_ids, logprobs, seat, self._give_back)

    def _find(self, num_tokens: int) -> _Bucket:
        at = bisect.bisect_left(self._buckets, num_tokens, key=lambda b: b.layout.num_tokens)
        if at < len(self._buckets):
            return self._buckets[at]
        return self._place(self._layout(num_tokens))

    def _place(self, layout: InputLayout) -> _Bucket:
        buffer = self._buffer[: layout.num_bytes]
        return _Bucket(layout, buffer, layout.view_device(buffer))

    def _layout(self, num_tokens: int) -> InputLayout:
        return InputLayout(num_tokens, min(num_tokens, self._rows.max_rows))

    def _take_seat(self) -> _Seat:
        if self._seats:
            return self._seats.pop()
        return _Seat(self._num_bytes, len(self._outputs), self._device)

    def _give_back(self, seat: _Seat) -> None:
        self._seats.append(seat)
