"""The sockets between processes: the scheduler binds ROUTERs, everyone else connects DEALERs.

Endpoints are files in one run directory of mode 0700 (`ipc://`); `tcp://` is refused unless CURVE
keys are given. High-water marks are finite and ROUTER_MANDATORY is set, so a send to a peer that is
gone or does not read is refused here instead of being dropped in silence. No socket may be used
from two threads.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from freetoken import log
from freetoken.errors import ConfigError
from freetoken.wire.codec import WireError, decode, encode
from freetoken.wire.messages import Message

HIGH_WATER_MARK = 4096
MAX_SOCKET_PATH_BYTES = 107
"""sun_path holds 108 bytes with the final NUL (unix(7))."""

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A server key pair and the one client key pair that may connect (Z85 text, see zmq curve)."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the scheduler listens."""

    api: str
    worker: str
    beats: str

    @classmethod
    def in_directory(cls, run_dir: Path) -> Endpoints:
        """`ipc://` endpoints in `run_dir`; ConfigError if the path is too long for a socket."""
        names = {name: str(run_dir / f"{name}.sock") for name in ("api", "worker", "beats")}
        longest = max(names.values(), key=lambda path: len(os.fsencode(path)))
        length = len(os.fsencode(longest))
        if length > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"socket path {longest} has {length} bytes, the system's limit is "
                f"{MAX_SOCKET_PATH_BYTES}; choose a shorter --run-dir"
            )
        return cls(**{name: f"ipc://{path}" for name, path in names.items()})

    def paths(self) -> Iterator[Path]:
        """The socket files, for clean-up."""
        for endpoint in (self.api, self.worker, self.beats):
            if endpoint.startswith("ipc://"):
                yield Path(endpoint.removeprefix("ipc://"))


def make_run_dir(path: Path) -> Path:
    """Create `path` with mode 0700, or check that an existing one is ours and private.

    An empty one is made private; one that holds something is somebody's choice, and refused.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat()
    if info.st_uid != os.getuid():
        raise ConfigError(f"run directory {path} belongs to uid {info.st_uid}, not {os.getuid()}")
    mode = stat.S_IMODE(info.st_mode)
    if mode & 0o077:
        if any(path.iterdir()):
            raise ConfigError(
                f"run directory {path} is open to others (mode {mode:04o}) and not empty; close it "
                "with chmod 700, or give another --run-dir"
            )
        path.chmod(0o700)
    return path


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: CurveKeys | None = None
) -> zmq.Socket[bytes]:
    """The scheduler's end. ConfigError if the endpoint cannot be bound."""
    _check_private(endpoint, keys)
    socket = context.socket(zmq.ROUTER)
    _set_options(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _secure(socket, keys, is_server=True)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"cannot listen on {endpoint}: {error}") from error
    return socket


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: str,
    keys: CurveKeys | None = None,
) -> zmq.Socket[bytes]:
    """A peer's end; it reconnects by itself, so start order does not matter.

    `identity` must be new in every life of a process (put the pid and a random part in it).
    """
    _check_private(endpoint, keys)
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    _secure(socket, keys, is_server=False)
    socket.connect(endpoint)
    return socket


def _set_options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)


def _check_private(endpoint: str, keys: CurveKeys | None) -> None:
    """ConfigError if messages would leave this machine unencrypted; before a socket is opened."""
    if keys is None and not endpoint.startswith(("ipc://", "inproc://")):
        raise ConfigError(f"{endpoint} would leave this machine unencrypted: CURVE keys needed")


def _secure(socket: zmq.Socket[bytes], keys: CurveKeys | None, *, is_server: bool) -> None:
    if keys is None:
        return
    if is_server:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


class Router:
    """The scheduler's view of a ROUTER: messages to and from named peers, never blocking."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.num_malformed = 0

    def receive(self) -> tuple[bytes, Message] | None:
        """The next (peer, message) that is well formed, or None when nothing more is queued."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) != 2:
                self._count(f"{len(frames)} frames instead of 2")
                continue
            try:
                return frames[0], decode(frames[1])
            except WireError as error:
                self._count(str(error))

    def send(self, peer: bytes, message: Message) -> bool:
        """False if the peer is gone or its queue is full: abort what it had asked for."""
        try:
            self.socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _count(self, what: str) -> None:
        self.num_malformed += 1
        _log.warning(log.event("wire.malformed", count=self.num_malformed, what=what))


class Dealer:
    """A peer's view of its DEALER (synchronous; the api wraps the socket with zmq.asyncio)."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.num_malformed = 0

    def receive(self, timeout_ms: int) -> Message | None:
        """The next well-formed message, or None after `timeout_ms` without one."""
        while self.socket.poll(timeout_ms):
            frames = self.socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames instead of 1")
                return decode(frames[0])
            except WireError as error:
                self.num_malformed += 1
                _log.warning(log.event("wire.malformed", count=self.num_malformed, what=str(error)))
        return None

    def send(self, message: Message) -> None:
        """Blocks while the scheduler's queue is full (it reads all the time)."""
        self.socket.send(encode(message))
