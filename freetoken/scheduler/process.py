"""The scheduler process: sockets, heartbeats and signals around the Scheduler.

One thread runs the loop: take results, plan, send plans, then tell the apis; a second one answers
heartbeats and reads plain attributes only. Nothing here decides about requests or pages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import setproctitle
import zmq

from freetoken import log
from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.scheduler.apis import ApiSide
from freetoken.scheduler.collector import Collector
from freetoken.scheduler.health import Health, Signs, Status
from freetoken.scheduler.pace import Fairness
from freetoken.scheduler.peers import PeerTable
from freetoken.scheduler.scheduler import Scheduler
from freetoken.scheduler.workers import WorkerSide
from freetoken.wire.beats import BeatServer
from freetoken.wire.messages import Beat, EngineState, Phase
from freetoken.wire.sockets import Endpoints, Router, bind_router, make_run_dir

NAME = "freetoken-scheduler"
TICK_S = 0.25
"""How often time alone is looked at: lost peers, stalls, probes, progress of loading."""

REPORT_S = 0.5
"""How often EngineState is sent, loading or not: its counters feed /metrics."""

_log = log.get(__name__)


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. ConfigError if a socket cannot be bound."""
    if config.run_dir is None:
        raise ConfigError("the scheduler needs --run-dir, the directory of the sockets")
    setproctitle.setproctitle(NAME)
    log.setup(NAME, config.log_level)
    endpoints = Endpoints.in_directory(make_run_dir(config.run_dir))
    held = claim(config.run_dir)
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    process = SchedulerProcess(
        endpoints,
        Scheduler(
            config.max_queued_requests,
            config.max_queued_tokens,
            _make_seed,
            Fairness(config.max_stall_ms, config.decode_share),
        ),
        Health(config.stall_timeout_s),
        woken.fileno(),
    )
    process.collector.start(time.monotonic())
    with wake, woken, _signals_to(wake):
        process.serve()
    os.close(held)
    return 0


def claim(run_dir: Path) -> int:
    """A descriptor that holds the run directory for this process: binding would take the sockets
    of another scheduler away without a word."""
    held = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        raise ConfigError(
            f"another scheduler is running in {run_dir}; stop it or choose another --run-dir"
        ) from error
    return held


def _make_seed() -> int:
    return secrets.randbits(63)


@contextlib.contextmanager
def _signals_to(wake: socket.socket) -> Iterator[None]:
    """SIGTERM and SIGINT write a byte to `wake`, for the time of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    old_fd = signal.set_wakeup_fd(wake.fileno())
    old = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)


class SchedulerProcess:
    """The I/O loop; `stop_fd` turning readable ends it."""

    def __init__(
        self,
        endpoints: Endpoints,
        scheduler: Scheduler,
        health: Health,
        stop_fd: int,
        report_s: float = REPORT_S,
    ) -> None:
        self.epoch = time.time_ns() // 1000
        self.collector = Collector()
        self._endpoints = endpoints
        self._scheduler = scheduler
        self._health = health
        self._stop_fd = stop_fd
        self._report_s = report_s
        self._status = Status(Phase.STARTING, "")
        self._reported_s = 0.0
        self._ticked_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(stop_fd, zmq.POLLIN)
        try:
            self._open()
        except BaseException:
            self._context.destroy(0)
            raise

    def _open(self) -> None:
        routers = [
            Router(bind_router(self._context, endpoint))
            for endpoint in (self._endpoints.api, self._endpoints.worker)
        ]
        for router in routers:
            self._poller.register(router.socket, zmq.POLLIN)
        self._sockets = {router.socket for router in routers}
        self._beats = BeatServer(self._context, self._endpoints.beats, self._make_beat)
        apis, workers = (PeerTable(self._poller, self._beats) for _ in routers)
        self._apis = ApiSide(routers[0], apis, self._scheduler, self.epoch)
        self._worker = WorkerSide(
            routers[1], workers, self._scheduler, self._health, self._apis, self.epoch
        )
        self._routers = routers

    def serve(self) -> None:
        """Run until told to stop; then end everything and remove the sockets."""
        _log.info(log.event("listening", epoch=self.epoch))
        self._beats.start()
        try:
            while self._turn():
                pass
        finally:
            self._close()

    def _turn(self) -> bool:
        """One turn of the loop; False to stop."""
        ready = dict(self._poller.poll(int(min(TICK_S, self._report_s) * 1000)))
        if self._stop_fd in ready:
            return False
        now_s = time.monotonic()
        self._worker.receive(now_s)
        self._apis.receive(now_s)
        self._worker.send_plans(now_s)
        self._apis.flush(now_s)
        if now_s - self._ticked_s >= TICK_S or not self._sockets.issuperset(ready):
            self._ticked_s = now_s
            self._worker.drop_gone(now_s)
            self._worker.replace_lost(now_s)
            self._apis.drop_gone(now_s)
            self._apis.flush(now_s)
            self.collector.tick(now_s, not self._scheduler.num_in_flight)
        self._report(now_s)
        self._scheduler.journal.write()
        return True

    def _signs(self) -> Signs:
        scheduler = self._scheduler
        return Signs(
            has_worker=scheduler.worker is not None,
            num_open=scheduler.num_open,
            oldest_step_s=self._worker.awaited_since_s,
            last_token_s=scheduler.last_token_s,
        )

    def _report(self, now_s: float) -> None:
        """Probe if need be; tell the apis every change of phase at once, the rest twice a
        second."""
        self._worker.note_progress(self._beats)
        if self._health.must_probe(self._signs(), now_s):
            self._scheduler.check_idle()
            self._scheduler.probe(now_s)
            self._worker.send_plans(now_s)
        status = self._health.status(self._signs(), now_s)
        changed = status.phase is not self._status.phase
        if changed:
            _log.info(log.event("phase", phase=status.phase, detail=status.detail))
        self._status = status
        if changed or now_s - self._reported_s >= self._report_s or self._apis.has_newcomers:
            self._reported_s = now_s
            self._apis.tell_state(self._engine_state())

    def _engine_state(self) -> EngineState:
        scheduler, status = self._scheduler, self._status
        scheduler.counters.malformed_frames = self._beats.num_malformed + sum(
            router.num_malformed for router in self._routers
        )
        return EngineState(
            phase=status.phase,
            detail=status.detail,
            loaded_bytes=status.loaded_bytes,
            total_bytes=status.total_bytes,
            context_tokens=scheduler.worker.context_tokens if scheduler.worker else 0,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            counters=scheduler.gauges(),
            given_up_pid=self._worker.given_up_pid,
        )

    def _make_beat(self) -> Beat:
        """Called in the heartbeat thread."""
        status = self._status
        return Beat(
            NAME,
            os.getpid(),
            self.epoch,
            status.phase,
            status.detail,
            status.loaded_bytes,
            status.total_bytes,
        )

    def _close(self) -> None:
        now_s = time.monotonic()
        self._worker.shut_down("the scheduler is ending", now_s)
        self._apis.flush(now_s)
        self._scheduler.journal.write()
        self._beats.stop()
        for router in self._routers:
            router.socket.close(linger=500)
        self._context.term()
        for path in self._endpoints.paths():
            path.unlink(missing_ok=True)
        _log.info(log.event("end"))
