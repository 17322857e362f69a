"""Heartbeats: a thread of its own per process, so that loading and compiling count as alive.

The scheduler runs a BeatServer, every other process a BeatClient. A peer is lost after LOST_S
without a beat, not counting what its judge was stopped itself (Attention). A process on the same
machine that exits is noticed at once through `open_exit_fd`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from freetoken import log
from freetoken.wire.codec import WireError, decode, encode
from freetoken.wire.messages import Beat
from freetoken.wire.sockets import CurveKeys, bind_router, connect_dealer

INTERVAL_S = 0.5
LOST_S = 5.0
MAX_BREAK_S = 2.0
"""Between two looks at the others of one who is not stopped, nor starved of the processor."""

MakeBeat = Callable[[], Beat]
"""Called in the heartbeat thread; reads plain attributes only."""

_log = log.get(__name__)


def open_exit_fd(pid: int) -> int | None:
    """A descriptor that turns readable when process `pid` exits (pidfd_open(2)), or None.

    None on systems without pidfds and for a process of another machine or pid namespace: there
    heartbeats alone tell.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None


class Attention:
    """Since when its owner has looked at others without a break.

    Who was stopped (with a whole container or machine, say) has heard nobody meanwhile, and must
    not take that for their silence.
    """

    def __init__(self) -> None:
        self._since_s = self._looked_s = float("-inf")

    def since(self, now_s: float) -> float:
        """The time (time.monotonic), at a look of now."""
        if now_s - self._looked_s > MAX_BREAK_S:
            self._since_s = now_s
        self._looked_s = now_s
        return self._since_s


@dataclass(frozen=True, slots=True)
class Heard:
    """The last beat of a peer and when it came (time.monotonic)."""

    beat: Beat
    at_s: float


class _BeatThread:
    """One socket, one thread; `stop` joins it. What is no beat is counted, logged and dropped."""

    def __init__(self, name: str, make_beat: MakeBeat) -> None:
        self.num_malformed = 0
        self._make_beat = make_beat
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=2 * INTERVAL_S + 1)

    def _run(self) -> None:
        raise NotImplementedError

    def _read(self, frame: bytes) -> Beat | None:
        try:
            beat = decode(frame)
        except WireError as error:
            self._count(str(error))
            return None
        if isinstance(beat, Beat):
            return beat
        self._count(f"a {type(beat).__name__} instead of a Beat")
        return None

    def _count(self, what: str) -> None:
        self.num_malformed += 1
        _log.warning(log.event("wire.malformed", count=self.num_malformed, what=what))


class BeatServer(_BeatThread):
    """The scheduler's side: answers every beat with its own. `heard` is safe to read anywhere."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        make_beat: MakeBeat,
        keys: CurveKeys | None = None,
    ) -> None:
        super().__init__("beats", make_beat)
        self._socket = bind_router(context, endpoint, keys)
        self._heard: dict[str, Heard] = {}

    def heard(self, name: str) -> Heard | None:
        return self._heard.get(name)

    def is_lost(self, name: str, now_s: float, since_s: float) -> bool:
        """True if `name` was heard once and then not for LOST_S, counted from `since_s`."""
        last = self._heard.get(name)
        return last is not None and now_s - max(last.at_s, since_s) > LOST_S

    def forget(self, name: str) -> None:
        self._heard.pop(name, None)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._socket.poll(int(INTERVAL_S * 1000)):
                continue
            frames = self._socket.recv_multipart()
            if len(frames) != 2:
                self._count(f"{len(frames)} frames instead of 2")
                continue
            beat = self._read(frames[1])
            if beat is None:
                continue
            self._heard[beat.name] = Heard(beat, time.monotonic())
            try:
                self._socket.send_multipart([frames[0], encode(self._make_beat())], zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # it went away between its beat and our answer
        self._socket.close(0)


class BeatClient(_BeatThread):
    """A peer's side. `last` is the scheduler's last beat, None before the first."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        identity: str,
        make_beat: MakeBeat,
        keys: CurveKeys | None = None,
    ) -> None:
        super().__init__("beats", make_beat)
        self._socket = connect_dealer(context, endpoint, f"{identity}-beat", keys)
        self.last: Heard | None = None

    def is_lost(self, now_s: float, since_s: float) -> bool:
        """True if the scheduler was heard once and then not for LOST_S, counted from `since_s`."""
        return self.last is not None and now_s - max(self.last.at_s, since_s) > LOST_S

    def _run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(zmq.Again):  # away: the queue holds enough beats already
                self._socket.send(encode(self._make_beat()), zmq.NOBLOCK)
            deadline_s = time.monotonic() + INTERVAL_S
            while (left_s := deadline_s - time.monotonic()) > 0:
                if not self._socket.poll(int(left_s * 1000) + 1):
                    break
                beat = self._read(self._socket.recv())
                if beat is None:
                    continue
                self.last = Heard(beat, time.monotonic())
                self._stopping.wait(max(0.0, deadline_s - time.monotonic()))
        self._socket.close(0)
