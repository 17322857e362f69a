"""The launcher's loop: start the rooms, pass on what they write, end them together.

Who may end: a room with `max_restarts` comes again, with growing pauses, while the others go on; if
it can stand by, another process of it does from the time that the first one loads.
The end of any other room is the end of the server: the rest go on for LINGER_S, so that clients get
their error and a 503 instead of a closed door, then all stop and the reason is raised. A room that
the others have given up, as health says, and that does not end is killed, which is an end like any
other. One thread, one select, which the keeper of the worker's banks shares; health comes from
another thread as a plain attribute.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from freetoken import log
from freetoken.errors import ConfigError, EngineError
from freetoken.launcher.child import Child, Room
from freetoken.launcher.given_up import GivenUp
from freetoken.launcher.health import Health
from freetoken.launcher.keeper import Keeper
from freetoken.launcher.notify import Notifier
from freetoken.launcher.report import Report
from freetoken.wire.messages import Phase

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LINGER_S = 2.0
STOP_S = 4.0
"""Children that have not ended then are killed, so that all is over within 5 s."""
TICK_S = 0.1
RESTART_WINDOW_S = 60.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
STARTING = (Phase.STARTING, Phase.LOADING, Phase.CHECKING)

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class _Failure:
    error: EngineError
    stop_at_s: float


class Supervisor:
    """Runs `rooms` until a signal (then `run` returns) or a failure (then it raises EngineError).

    `get_health` returns the latest answer of the server or None; `describe` what to print when it
    is ready for the first time.
    """

    def __init__(
        self,
        rooms: Sequence[Room],
        *,
        env: Mapping[str, str],
        get_health: Callable[[], Health | None],
        describe: Callable[[Health], str],
        report: Report,
        notifier: Notifier,
        keeper: Keeper | None = None,
    ) -> None:
        self._rooms = rooms
        self._env = env
        self._get_health = get_health
        self._describe = describe
        self._report = report
        self._notifier = notifier
        self._keeper = keeper
        self._given_up = GivenUp()
        self._children: dict[str, Child] = {}
        self._ends_s: dict[str, list[float]] = {}  # of rooms that were restarted
        self._due_s: dict[str, float] = {}  # when a room comes again
        self._standbys: dict[str, Child] = {}
        self._has_standbys = False
        self._failure: _Failure | None = None
        self._signals: list[int] = []
        self._has_been_ready = False
        self._status = ""
        self._pet_s = 0.0
        self._down_s: float | None = None  # since when it is not ready, having been
        self._ended_s: float | None = None  # when a room ended, until health shows it
        self._selector = selectors.DefaultSelector()
        self._lifeline, self._lifeline_end = os.pipe()

    def run(self) -> None:
        with self._handling_signals():
            try:
                if self._keeper is not None:
                    self._keeper.listen(self._selector)
                for room in self._rooms:
                    self._start(room)
                while not self._signals:
                    self._pump(TICK_S)
                    now_s = time.monotonic()
                    self._note_ends(now_s)
                    if self._failure is not None and now_s >= self._failure.stop_at_s:
                        raise self._failure.error
                    self._restart_due(now_s)
                    self._note_health(now_s)
                if self._failure is not None:
                    raise self._failure.error
            finally:
                self._stop()

    # ------------------------------------------------------------ children

    def _start(self, room: Room) -> None:
        standby = self._standbys.pop(room.name, None)
        if standby is None:
            self._children[room.name] = self._make_child(room, stands_by=False)
            return
        self._children[room.name] = standby
        standby.call()

    def _stand_by(self) -> None:
        """Once for each time that the server becomes ready, while it loads or then: if one ends
        early, a start takes longer. The first is made when the memory plan stands."""
        if not self._has_standbys and self._failure is None:
            self._has_standbys = True
            for room in self._rooms:
                if room.standby_argv and room.name not in self._standbys:
                    self._standbys[room.name] = self._make_child(room, stands_by=True)

    def _make_child(self, room: Room, *, stands_by: bool) -> Child:
        child = Child(room, self._env, self._lifeline, self._report.log_line, stands_by=stands_by)
        self._selector.register(child.output_fd, selectors.EVENT_READ, child)
        return child

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, socket.socket):
                key.data.recv(4096)  # a signal: noted by its handler
            elif not isinstance(key.data, Child):
                key.data()  # the keeper's
            elif not key.data.pump():
                self._selector.unregister(key.fd)
                key.data.close()

    def _forget(self, child: Child) -> None:
        """Read its last words and let go of it."""
        if child.output_fd in self._selector.get_map():
            child.pump()
            self._selector.unregister(child.output_fd)
            child.close()
        child.kill_group()  # what it may have started
        child.let_go()
        for group in (self._children, self._standbys):
            if group.get(child.room.name) is child:
                del group[child.room.name]

    def _note_ends(self, now_s: float) -> None:
        for standby in [child for child in self._standbys.values() if child.returncode is not None]:
            self._forget(standby)
            _log.warning(log.event("standby.ended", reason=standby.explain_end()))
        for child in [child for child in self._children.values() if child.returncode is not None]:
            self._forget(child)
            reason, code = child.explain_end(), child.returncode
            if self._failure is not None:
                continue  # the first reason is the real one
            if child.room.max_restarts and self._has_been_ready and code != ConfigError.exit_code:
                self._plan_restart(child.room, reason, now_s)
                continue
            _log.error(log.event("process.ended", reason=reason))
            self._fail(reason, code, now_s)

    def _plan_restart(self, room: Room, reason: str, now_s: float) -> None:
        ends_s = self._ends_s.setdefault(room.name, [])
        ends_s[:] = [at_s for at_s in ends_s if now_s - at_s < RESTART_WINDOW_S] + [now_s]
        if len(ends_s) > room.max_restarts:
            self._fail(f"{reason}; {len(ends_s)} times in {RESTART_WINDOW_S:.0f} s", 1, now_s)
            return
        self._ended_s = now_s if self._ended_s is None else self._ended_s
        pause_s = min(FIRST_PAUSE_S * 2 ** (len(ends_s) - 1), MAX_PAUSE_S)
        self._due_s[room.name] = now_s + pause_s
        _log.warning(log.event("process.restart", reason=reason, pause_s=pause_s))

    def _restart_due(self, now_s: float) -> None:
        for room in self._rooms:
            if self._failure is None and self._due_s.get(room.name, now_s + 1) <= now_s:
                del self._due_s[room.name]
                self._start(room)

    def _fail(self, reason: str, code: int | None, now_s: float) -> None:
        """Before it was ready nobody needs the 503, and a ConfigError keeps its exit code."""
        error = ConfigError if code == ConfigError.exit_code else EngineError
        linger_s = LINGER_S if self._has_been_ready else 0.0
        self._failure = _Failure(error(reason), now_s + linger_s)
        self._notifier.status(reason)

    def _stop(self) -> None:
        """End all children: asked first, killed after STOP_S or at a second signal."""
        self._notifier.stopping("stopping" if self._failure is None else str(self._failure.error))
        begun_s = time.monotonic()
        deadline_s = begun_s + STOP_S
        num_signals = len(self._signals)
        everyone = [*self._children.values(), *self._standbys.values()]
        for child in everyone:
            child.send(signal.SIGTERM)
        while any(child.returncode is None for child in everyone):
            if time.monotonic() >= deadline_s or len(self._signals) > num_signals:
                break
            self._pump(TICK_S)
        for child in everyone:
            if child.returncode is None:
                after_s = time.monotonic() - begun_s  # less than STOP_S at a second signal
                _log.warning(log.event("process.killed", process=child.room.name, after_s=after_s))
            child.kill_group()
            child.wait(deadline_s + 1)
            self._forget(child)
        if self._keeper is not None:
            self._keeper.close()
        self._selector.close()
        os.close(self._lifeline)
        os.close(self._lifeline_end)

    # ------------------------------------------------------------ health

    def _note_health(self, now_s: float) -> None:
        health = self._get_health()
        if not self._has_been_ready and self._failure is None:
            if health is not None and health.is_ready:
                self._has_been_ready = True
                self._report.ready(health, self._describe(health))
                self._notifier.ready(f"serving {health.model}")
            else:
                self._report.progress(health or Health(is_ready=False, phase=Phase.STARTING))
        status = "the api does not answer" if health is None else f"{health.phase} {health.detail}"
        if status != self._status and self._failure is None:
            self._status = status
            self._notifier.status(status)
        if health is not None and (health.is_ready or health.phase is Phase.LOADING):
            self._stand_by()
        self._kill_given_up(health, now_s)
        self._note_recovery(health, now_s)
        self._pet(health, now_s)

    def _kill_given_up(self, health: Health | None, now_s: float) -> None:
        pid = self._given_up.find_overdue(health, now_s)
        for child in self._children.values():
            if health is not None and child.pid == pid and not child.is_killed:
                _log.error(log.event("process.hung", process=child.room.name, why=health.detail))
                child.kill(health.detail)

    def _note_recovery(self, health: Health | None, now_s: float) -> None:
        """A line when the server is ready again, with the seconds that it was not."""
        is_ready = health is not None and health.is_ready
        if self._has_been_ready and not is_ready and self._down_s is None:
            self._down_s = now_s if self._ended_s is None else self._ended_s
            self._ended_s = None
        if is_ready and self._down_s is not None:
            _log.info(log.event("server.ready_again", after_s=now_s - self._down_s))
            self._down_s = None
            self._has_standbys = False

    def _pet(self, health: Health | None, now_s: float) -> None:
        """Signs of life while it or a new worker starts and while ready; a stalled server gives
        none."""
        interval_s = self._notifier.watchdog_s
        is_well = not self._has_been_ready or (
            health is not None and (health.is_ready or health.phase in STARTING)
        )
        if interval_s is not None and is_well and now_s - self._pet_s >= interval_s:
            self._pet_s = now_s
            self._notifier.alive()

    # ------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Signals end the loop at its next turn, which a byte on a socket brings at once."""
        wake, wake_end = socket.socketpair()
        wake.setblocking(False)
        wake_end.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, wake)

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        # nohup(1) has SIGHUP ignored: it stays so
        wanted = [
            number
            for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ]
        old_handlers = {number: signal.signal(number, note) for number in wanted}
        old_fd = signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            wake.close()
            wake_end.close()
