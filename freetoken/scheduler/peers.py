"""The processes that are connected to us, by their socket identity, and how we learn of their end.

A peer is gone when its process exits (pidfd) or its heartbeats stop. Called by the I/O loop.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass, field

import zmq

from freetoken.wire.beats import LOST_S, Attention, BeatServer, open_exit_fd
from freetoken.wire.messages import Failed, Hello


@dataclass(slots=True, eq=False)
class Peer:
    """`name` is the same in its hello and its heartbeats. `owed`: terminal messages that its full
    queue refused, to be sent again."""

    identity: bytes
    name: str
    pid: int
    exit_fd: int | None
    epoch: int
    hello_s: float
    owed: deque[Failed] = field(default_factory=deque)

    @property
    def has_exited(self) -> bool | None:
        """None: this system cannot tell."""
        if self.exit_fd is None:
            return None
        poller = zmq.Poller()
        poller.register(self.exit_fd, zmq.POLLIN)
        return bool(poller.poll(0))


class PeerTable:
    """Peers of one role. Registers their exit descriptors with the loop's poller."""

    def __init__(self, poller: zmq.Poller, beats: BeatServer) -> None:
        self._poller = poller
        self._beats = beats
        self._by_identity: dict[bytes, Peer] = {}
        self._attention = Attention()
        self.watched_since_s = 0.0  # without a break, up to the last `gone`

    def get(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def find(self, name: str) -> Peer | None:
        """The peer with that name: one process has one connection at a time."""
        return next((peer for peer in self._by_identity.values() if peer.name == name), None)

    def all(self) -> list[Peer]:
        return list(self._by_identity.values())

    def add(self, identity: bytes, hello: Hello, epoch: int, now_s: float) -> Peer:
        exit_fd = open_exit_fd(hello.pid)
        if exit_fd is not None:
            self._poller.register(exit_fd, zmq.POLLIN)
        peer = Peer(identity, hello.name, hello.pid, exit_fd, epoch, now_s)
        self._by_identity[identity] = peer
        return peer

    def remove(self, peer: Peer) -> None:
        self._by_identity.pop(peer.identity, None)
        self._beats.forget(peer.name)
        if peer.exit_fd is not None:
            self._poller.unregister(peer.exit_fd)
            with contextlib.suppress(OSError):
                os.close(peer.exit_fd)
            peer.exit_fd = None

    def gone(self, now_s: float) -> list[tuple[Peer, str]]:
        """Peers that have exited or fallen silent, with the reason. To be asked all the time."""
        self.watched_since_s = self._attention.since(now_s)
        found = []
        for peer in self._by_identity.values():
            if peer.has_exited:
                found.append((peer, f"process {peer.pid} has exited"))
            elif self._is_silent(peer, now_s):
                found.append((peer, f"process {peer.pid} has had no heartbeat for {LOST_S:g} s"))
        return found

    def _is_silent(self, peer: Peer, now_s: float) -> bool:
        since_s = self.watched_since_s
        if peer.exit_fd is None and self._beats.heard(peer.name) is None:
            # It may have died before its first beat.
            return now_s - max(peer.hello_s, since_s) > LOST_S
        return self._beats.is_lost(peer.name, now_s, since_s)
