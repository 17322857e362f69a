"""Holds the descriptor of the worker's banks, so that their memory outlives a worker that dies.

One memory at a time: a new one, or a question for another, frees the old. Runs in the launcher's
select loop and never blocks; what a peer sends that is no request is logged and dropped. The
protocol is wire/keeping.py's; the worker's side is worker/keeper.py.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
from functools import partial
from pathlib import Path

from freetoken import log
from freetoken.wire.codec import WireError
from freetoken.wire.keeping import NONE, OK, KeepRequest, Verb, receive_packet, send_packet

MAX_PEERS = 8
"""Connected and silent; the oldest goes when there are more."""

_log = log.get(__name__)


class Keeper:
    """Listens at `path` from `listen` to `close`; then everything is let go of."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: tuple[str, int] | None = None  # digest, descriptor
        self._selector: selectors.BaseSelector | None = None
        self._listener: socket.socket | None = None
        self._peers: list[socket.socket] = []

    @property
    def held_digest(self) -> str | None:
        return None if self._held is None else self._held[0]

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Registers callables with `selector`, to be called when their socket is readable.

        Where there is no such socket to be had, nothing is kept.
        """
        self._path.unlink(missing_ok=True)
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(str(self._path))
            self._path.chmod(0o600)
            self._listener.listen(MAX_PEERS)
        except OSError as error:
            _log.warning(log.event("keeper.absent", path=self._path, why=error.strerror))
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            return
        self._listener.setblocking(False)
        self._selector = selector
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for peer in list(self._peers):
            self._hang_up(peer)
        if self._listener is not None and self._selector is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        self._drop()

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._selector is not None
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        peer.setblocking(False)
        while len(self._peers) >= MAX_PEERS:
            self._hang_up(self._peers[0])
        self._peers.append(peer)
        self._selector.register(peer, selectors.EVENT_READ, partial(self._serve, peer))

    def _serve(self, peer: socket.socket) -> None:
        """Its one request, then the line is closed."""
        if peer not in self._peers:
            return  # it had to go while this call was due
        fd = None
        try:
            packet, fd = receive_packet(peer)
            request = KeepRequest.decode(packet) if packet else None
            if request is not None and request.verb is Verb.KEEP:
                self._keep(request.digest, fd)
                fd = None
            if request is not None:
                self._answer(peer, request)
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            _log.warning(log.event("keeper.rubbish", what=error))
        finally:
            if fd is not None:
                os.close(fd)
        self._hang_up(peer)

    def _keep(self, digest: str, fd: int | None) -> None:
        """Take `fd` over; WireError if it is nothing to keep."""
        if fd is None or not _is_memory(fd):
            raise WireError("KEEP without a memory")
        self._drop()
        self._held = (digest, fd)
        _log.info(log.event("bank.kept", digest=digest[:12]))

    def _answer(self, peer: socket.socket, request: KeepRequest) -> None:
        answer, fd = OK, None
        if request.verb is Verb.TAKE and self.held_digest == request.digest:
            assert self._held is not None
            fd = self._held[1]
        elif request.verb is not Verb.KEEP:
            self._drop()
            answer = OK if request.verb is Verb.DROP else NONE
        with contextlib.suppress(OSError):  # it did not wait for its answer
            send_packet(peer, answer, fd)

    def _drop(self) -> None:
        if self._held is not None:
            os.close(self._held[1])
            self._held = None

    def _hang_up(self, peer: socket.socket) -> None:
        assert self._selector is not None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer)
        self._peers.remove(peer)
        peer.close()


def _is_memory(fd: int) -> bool:
    """A memfd is a regular file without a name; anything else might block or pin a disk."""
    info = os.fstat(fd)
    return stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and info.st_size > 0
