"""How a worker hands the descriptor of its banks to the launcher, and asks for it again.

One request per connection of a SOCK_SEQPACKET socket in the run directory: a packet
`VERB DIGEST`, with the descriptor beside it for KEEP (SCM_RIGHTS, unix(7)); the answer is OK or
NONE, with a descriptor beside OK for TAKE. Both sides live on one machine under one user.
"""

from __future__ import annotations

import array
import contextlib
import os
import re
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from freetoken.wire.codec import WireError

SOCKET_NAME = "keep.sock"
"""No longer than the names in sockets.Endpoints, whose length is checked."""
MAX_PACKET_BYTES = 256
MAX_FDS = 4
"""That a rude peer may send with a packet; all but the first are closed."""
DIGEST = re.compile(r"[0-9a-f]{64}")
OK, NONE = b"OK", b"NONE"


class Verb(StrEnum):
    """KEEP: hold this instead of what you hold · TAKE: give me what you hold under this digest,
    and forget it if the digest is another · DROP: forget what you hold."""

    KEEP = "KEEP"
    TAKE = "TAKE"
    DROP = "DROP"


@dataclass(frozen=True, slots=True)
class KeepRequest:
    verb: Verb
    digest: str = ""

    def encode(self) -> bytes:
        return f"{self.verb} {self.digest}".encode()

    @classmethod
    def decode(cls, packet: bytes) -> KeepRequest:
        """WireError for what is no request."""
        verb, _, digest = packet.decode("ascii", errors="replace").partition(" ")
        if verb not in tuple(Verb) or not (DIGEST.fullmatch(digest) or verb == Verb.DROP):
            raise WireError(f"{packet[:40]!r} is no request")
        return cls(Verb(verb), digest)


def keeper_path(run_dir: Path) -> Path:
    """Where the keeper of `run_dir` listens."""
    return run_dir / SOCKET_NAME


def send_packet(peer: socket.socket, packet: bytes, fd: int | None = None) -> None:
    """`fd` stays open here."""
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    peer.sendmsg([packet], rights)


def receive_packet(peer: socket.socket) -> tuple[bytes, int | None]:
    """A packet, empty at the end, and the descriptor that came with it, which is ours to close."""
    fds = array.array("i")
    space = socket.CMSG_SPACE(MAX_FDS * fds.itemsize)
    packet, ancillary, _, _ = peer.recvmsg(MAX_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds[1:]:
        with contextlib.suppress(OSError):
            os.close(fd)
    return packet, fds[0] if fds else None
