"""A pass that is open: it runs some layers when asked to and waits between them.

transformers' forward cannot be left and entered again, so it runs in a thread of its own that
waits before a layer. Exactly one of that thread and its owner runs: the owner waits in `advance`
while the thread works, so nothing here needs a lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue

import torch

from freetoken.model.passes import PassRun

BeforeLayer = Callable[[], None]


class _Closed(BaseException):
    """Ends the forward of a pass that is given up; no handler of model code takes it."""


class _GiveUp:
    """The order to raise _Closed."""


class PassThread:
    """The thread in which a model's passes run, one after the other; begun with the first.

    It stays, because libraries keep by thread what they have prepared: cuDNN's attention plans, of
    some 70 ms each, are one such thing.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._has_begun = False

    def run(self, job: Callable[[], None]) -> None:
        """Queue `job`, which raises nothing."""
        self._jobs.put(job)
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=_work_off, args=[self._jobs], name="pass", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)


def _work_off(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """The thread, until there is nobody left who could queue anything."""
    while (job := jobs.get()) is not None:
        job()
        del job  # and with it what the pass has held


class OpenPass:
    """One pass over all layers. Made by ServedModel.start_pass.

    While it waits, on-demand steps may run. On a GPU `advance` returns when the layers are queued
    on the stream, not when they are done. When it is over it holds nothing but its logits; what has
    gone wrong is nobody's local variable, as its traceback holds the tensors of the forward.
    """

    def __init__(
        self,
        make_run: Callable[[BeforeLayer], PassRun],
        forward: Callable[[], torch.Tensor],
        device: torch.device,
        ended: Callable[[], None],
        thread: PassThread,
    ) -> None:
        """`forward`: the whole forward, called in the pass's thread · `ended`: called once."""
        self._run: PassRun | None = make_run(self._before_layer)
        self._forward: Callable[[], torch.Tensor] | None = forward
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._ended = ended
        self._num_threads = torch.get_num_threads()
        self._layers_left: int | None = 0
        # How many layers to run (None: all that are left), or the order to give up.
        self._orders: SimpleQueue[int | _GiveUp | None] = SimpleQueue()
        # None: paused · the logits · what went wrong.
        self._reports: SimpleQueue[torch.Tensor | BaseException | None] = SimpleQueue()
        self._thread = thread
        self._has_begun = False
        self._logits: torch.Tensor | None = None
        self._is_over = False

    def advance(self, num_layers: int | None = None) -> bool:
        """Run the next `num_layers` decoder layers (None: all that are left); True: it is done.

        Whatever goes wrong in the pass is raised here, and ends it.
        """
        assert num_layers is None or num_layers > 0
        if self._logits is not None:
            return True
        assert not self._is_over, "the pass is closed or has failed"
        if not self._has_begun:
            self._has_begun = True
            # With the owner's context: torch's compiler keeps its settings there.
            self._thread.run(partial(copy_context().run, self._work))
        self._num_threads = torch.get_num_threads()
        self._orders.put(num_layers)
        report = self._reports.get()
        if report is None:
            return False
        self._finish()
        if isinstance(report, torch.Tensor):
            self._logits = report
            return True
        try:
            raise report
        finally:
            del report

    def logits(self) -> torch.Tensor:
        """[n, V] float32 once `advance` has returned True."""
        assert self._logits is not None, "the pass is not done"
        return self._logits

    def close(self) -> None:
        """Give up what is left; harmless when the pass is over."""
        if self._is_over:
            return
        if self._has_begun:
            self._orders.put(_GiveUp())
            self._reports.get()
        self._finish()

    def _finish(self) -> None:
        self._is_over = True
        self._run = self._forward = None
        self._ended()

    def _work(self) -> None:
        self._reports.put(self._compute())

    def _compute(self) -> torch.Tensor | BaseException:
        """The thread. A new one starts outside inference mode and on the default stream."""
        try:
            run, forward = self._run, self._forward
            assert run is not None
            assert forward is not None
            self._take_order()
            with torch.inference_mode(), self._on_stream():
                try:
                    run.begin()
                    return forward()
                finally:
                    run.end()
        except BaseException as error:
            return error

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _before_layer(self) -> None:
        if self._layers_left == 0:
            assert self._run is not None
            self._run.pause()
            self._reports.put(None)
            self._take_order()
            self._run.resume()
        if self._layers_left is not None:
            self._layers_left -= 1

    def _take_order(self) -> None:
        order = self._orders.get()
        if isinstance(order, _GiveUp):
            raise _Closed
        self._layers_left = order
        # The number of threads belongs to a thread; the owner may have changed its own.
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
