"""The worker side of the I/O loop: one worker at a time, its results in, plans out."""

from __future__ import annotations

import os

from freetoken import log
from freetoken.scheduler.apis import ApiSide, refusal, refuse
from freetoken.scheduler.health import Health, Status
from freetoken.scheduler.peers import Peer, PeerTable
from freetoken.scheduler.results import Outputs
from freetoken.scheduler.scheduler import Scheduler
from freetoken.scheduler.validate import fault_of
from freetoken.wire.beats import BeatServer
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    FailureScope,
    Hello,
    Message,
    Role,
    Shutdown,
    StepResult,
    Welcome,
    WorkerFailed,
    WorkerReady,
)
from freetoken.wire.sockets import Router

_log = log.get(__name__)


class WorkerSide:
    """Each hello begins a life of the worker with an epoch of its own; what bears an older epoch
    is dropped."""

    def __init__(
        self,
        router: Router,
        peers: PeerTable,
        scheduler: Scheduler,
        health: Health,
        apis: ApiSide,
        epoch: int,
    ) -> None:
        self._router = router
        self._peers = peers
        self._scheduler = scheduler
        self._health = health
        self._apis = apis
        self._epoch = epoch
        self._worker: Peer | None = None
        self._given_up_pid = 0
        self._result_s = 0.0
        self._num_malformed = 0  # frames of the socket, when there was no doubt about a result

    @property
    def awaited_since_s(self) -> float | None:
        """Since when the worker has had a step to run without a result; None if it has none."""
        oldest_s = self._scheduler.oldest_step_s
        return None if oldest_s is None else max(oldest_s, self._result_s)

    @property
    def given_up_pid(self) -> int:
        """Process of the worker that was lost, until another comes; 0: none."""
        return self._given_up_pid

    # ------------------------------------------------------------ in

    def receive(self, now_s: float) -> None:
        while (received := self._router.receive()) is not None:
            self._take(*received, now_s)

    def _take(self, identity: bytes, message: Message, now_s: float) -> None:
        worker = self._worker
        if isinstance(message, Hello):
            self._welcome(identity, message, now_s)
            return
        epoch = getattr(message, "epoch", None)
        is_worker = worker is not None and worker.identity == identity
        if (
            is_worker
            and isinstance(message, WorkerFailed)
            and message.scope is FailureScope.PROCESS
        ):
            self._lose(message.message, now_s)  # of whatever epoch: it may have none yet
            return
        if not is_worker or worker is None or epoch != worker.epoch:
            self._scheduler.counters.stale_messages += 1
            _log.info(log.event("worker.stale", message=type(message).__name__, epoch=epoch))
            return
        match message:
            case StepResult():
                self._note_result(now_s)
                outputs = self._scheduler.apply(message, now_s)
                self._post(outputs, message.step_id)
            case WorkerReady():
                self._ready(worker, message, now_s)
            case WorkerFailed():
                self._note_result(now_s)
                _log.error(log.event("step.failed", step=message.step_id, why=message.message))
                outputs = self._scheduler.fail_step(message.step_id, message.message, now_s)
                self._post(outputs, message.step_id)
            case _:
                self._scheduler.counters.stale_messages += 1
                _log.warning(log.event("worker.unexpected", message=type(message).__name__))

    def replace_lost(self, now_s: float) -> None:
        """A result that is overdue after a malformed frame was that frame: have it made again.

        One that is overdue without is still being computed, as far as we know. Should we be wrong,
        it is dropped when it comes, and nothing is lost: the worker takes its plans in order.
        """
        since_s = self.awaited_since_s
        if (
            since_s is not None
            and self._router.num_malformed > self._num_malformed
            and self._health.is_overdue(since_s, now_s)
        ):
            self._note_result(now_s)
            while self._scheduler.num_in_flight:
                self._scheduler.lose_result()
            self.send_plans(now_s)

    def _note_result(self, now_s: float) -> None:
        self._result_s = now_s
        self._num_malformed = self._router.num_malformed

    def _post(self, outputs: Outputs | None, step_id: int | None) -> None:
        if outputs is None:
            self._scheduler.counters.stale_messages += 1
            _log.warning(log.event("worker.wrong_step", step=step_id))
        else:
            self._apis.post(outputs)
            self._health.note_step(outputs.error, outputs.probe_failed)

    def _welcome(self, identity: bytes, hello: Hello, now_s: float) -> None:
        if hello.protocol != PROTOCOL_VERSION or hello.role is not Role.WORKER:
            self._router.send(identity, refusal(hello, Role.WORKER))
            return
        old = self._worker
        if old is not None and old.identity != identity and old.has_exited is False:
            reason = f"worker {old.name} (process {old.pid}) is connected already"
            self._router.send(identity, refuse(hello, reason))
            return
        if old is not None:
            self._lose(f"worker {old.name} began anew", now_s)
        self._epoch += 1
        self._worker = self._peers.add(identity, hello, self._epoch, now_s)
        self._given_up_pid = 0
        self._health.connected()
        self._router.send(identity, Welcome(PROTOCOL_VERSION, os.getpid(), self._epoch))
        _log.info(log.event("worker.connected", peer=hello.name, pid=hello.pid, epoch=self._epoch))

    def _ready(self, worker: Peer, message: WorkerReady, now_s: float) -> None:
        fault = fault_of(message)
        if fault is not None:
            self._give_up(worker, f"its capacities make no sense: {fault}", now_s)
            return
        if self._scheduler.worker is not None:
            self._apis.post_failed(self._scheduler.detach("the worker began anew", now_s))
        self._scheduler.attach(message)
        self._note_result(now_s)
        _log.info(
            log.event(
                "worker.ready",
                model=message.model,
                context=message.context_tokens,
                pages=message.num_pages,
                page_size=message.page_size,
                rows=message.max_rows,
            )
        )

    def note_progress(self, beats: BeatServer) -> None:
        """What the worker's heartbeats say about loading."""
        worker = self._worker
        heard = beats.heard(worker.name) if worker is not None else None
        if heard is not None:
            beat = heard.beat
            self._health.note_progress(Status(beat.phase, beat.detail, beat.done, beat.total))

    # ------------------------------------------------------------ out

    def send_plans(self, now_s: float) -> None:
        """Keep the worker busy: plans until two steps are in flight or nothing is to do."""
        worker = self._worker
        if not self._scheduler.num_in_flight:
            self._num_malformed = self._router.num_malformed
        while worker is not None and (plan := self._scheduler.plan(now_s)) is not None:
            if not self._router.send(worker.identity, plan):
                self._give_up(worker, "cannot be reached", now_s)
                return

    def drop_gone(self, now_s: float) -> None:
        for peer, reason in self._peers.gone(now_s):
            self._give_up(peer, reason, now_s)
        worker, since_s = self._worker, self.awaited_since_s
        if worker is None or since_s is None:
            return
        if self._health.is_hung(max(since_s, self._peers.watched_since_s), now_s):
            reason = f"process {worker.pid} has not ended a step in {now_s - since_s:.0f} s"
            self._give_up(worker, reason, now_s)

    def _give_up(self, worker: Peer, reason: str, now_s: float) -> None:
        """Should it come to life again, it must end: its pages are forgotten."""
        self._router.send(worker.identity, Shutdown(reason))
        self._lose(f"worker {worker.name}: {reason}", now_s)

    def _lose(self, reason: str, now_s: float) -> None:
        worker = self._worker
        assert worker is not None, "a worker is lost only once"
        self._worker = None
        self._given_up_pid = worker.pid
        self._peers.remove(worker)
        _log.error(log.event("worker.lost", peer=worker.name, why=reason))
        self._health.lost(reason)
        self._apis.post_failed(self._scheduler.detach(reason, now_s))

    def shut_down(self, reason: str, now_s: float) -> None:
        """Tell the worker to end, and every open request that it will not."""
        if self._worker is not None:
            self._router.send(self._worker.identity, Shutdown(reason))
            self._peers.remove(self._worker)
            self._worker = None
        self._apis.post_failed(self._scheduler.detach(reason, now_s))
