"""The api side of the I/O loop: hellos, submits and aborts in; tokens, failures and state out."""

from __future__ import annotations

import os

from freetoken import log
from freetoken.errors import ErrorCode
from freetoken.scheduler.peers import Peer, PeerTable
from freetoken.scheduler.results import Outputs
from freetoken.scheduler.scheduler import Scheduler
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineState,
    Failed,
    Hello,
    Message,
    Refused,
    Role,
    Submit,
    Tokens,
    Welcome,
)
from freetoken.wire.sockets import Router

MAX_MESSAGES_A_TURN = 32
"""So that a flood of submits, 20 to 50 µs each, does not keep results waiting."""

_log = log.get(__name__)


class ApiSide:
    """`peers` are the apis that said hello; one that cannot be reached has its requests aborted.
    Answers wait in one queue until `flush`, so that the next plan goes out before them."""

    def __init__(self, router: Router, peers: PeerTable, scheduler: Scheduler, epoch: int) -> None:
        self._router = router
        self._peers = peers
        self._scheduler = scheduler
        self._epoch = epoch
        self._outbox: list[tuple[bytes, Message]] = []
        self.has_newcomers = False

    def receive(self, now_s: float) -> None:
        for _ in range(MAX_MESSAGES_A_TURN):
            received = self._router.receive()
            if received is None:
                return
            self._take(*received, now_s)

    def _take(self, identity: bytes, message: Message, now_s: float) -> None:
        peer = self._peers.get(identity)
        match message:
            case Hello():
                self._welcome(identity, message, now_s)
            case Submit() if peer is None:
                text = "say hello first: the scheduler has restarted"
                code = ErrorCode.ENGINE_UNAVAILABLE
                self._outbox.append((identity, Failed(message.request_id, code, text, None, 1.0)))
            case Submit():
                self._outbox.append((identity, self._scheduler.submit(identity, message, now_s)))
            case Abort() if peer is not None:
                delta = self._scheduler.abort(identity, message.request_id, now_s)
                if delta is not None:
                    self._outbox.append((identity, Tokens((delta,), 0)))
            case _:
                self._scheduler.counters.stale_messages += 1
                _log.warning(log.event("api.unexpected", message=type(message).__name__))

    def _welcome(self, identity: bytes, hello: Hello, now_s: float) -> None:
        if hello.protocol != PROTOCOL_VERSION or hello.role is not Role.API:
            self._outbox.append((identity, refusal(hello, Role.API)))
            return
        if self._peers.get(identity) is None:
            if (before := self._peers.find(hello.name)) is not None:
                self._drop(before, "says hello on a new connection", now_s)
            self._peers.add(identity, hello, self._epoch, now_s)
            _log.info(log.event("api.connected", peer=hello.name, pid=hello.pid))
        self._outbox.append((identity, Welcome(PROTOCOL_VERSION, os.getpid(), self._epoch)))
        self.has_newcomers = True

    # ------------------------------------------------------------ out

    def post(self, outputs: Outputs) -> None:
        """Queue what a step brought, behind what was queued before."""
        for api, deltas in outputs.deltas.items():
            self._outbox.append((api, Tokens(tuple(deltas), outputs.step_us)))
        self._outbox.extend(outputs.failed)

    def post_failed(self, failed: list[tuple[bytes, Failed]]) -> None:
        self._outbox.extend(failed)

    def flush(self, now_s: float) -> None:
        """Send what is queued, in its order: a terminal message is a request's last.

        After a refusal nothing more goes to that api in this turn: a stream that lost tokens must
        not get its later ones.
        """
        outbox, self._outbox = self._outbox, []
        refused: set[bytes] = set()
        for identity, message in outbox:
            if identity in refused or not self._router.send(identity, message):
                refused.add(identity)
                self._cut_off(identity, message, now_s)
        for peer in self._peers.all():
            while peer.owed and self._router.send(peer.identity, peer.owed[0]):
                peer.owed.popleft()

    def tell_state(self, state: EngineState) -> None:
        """To every api; one that does not read misses it."""
        self.has_newcomers = False
        for peer in self._peers.all():
            self._router.send(peer.identity, state)

    def _cut_off(self, identity: bytes, message: Message, now_s: float) -> None:
        """An api refused `message`: it is owed the ends of its requests."""
        peer = self._peers.get(identity)
        if peer is None:
            return
        _log.warning(log.event("api.unreachable", peer=peer.name, pid=peer.pid))
        self._owe(peer, message)
        for request_id in self._scheduler.abort_all(identity, now_s):
            peer.owed.append(_overrun(request_id))

    def _owe(self, peer: Peer, message: Message) -> None:
        """Requests whose terminal message was refused get one when the peer reads again."""
        match message:
            case Failed():
                peer.owed.append(message)
            case Tokens():
                ended = (d.request_id for d in message.deltas if d.finish_reason is not None)
                peer.owed.extend(_overrun(request_id) for request_id in ended)

    def drop_gone(self, now_s: float) -> None:
        for peer, reason in self._peers.gone(now_s):
            self._drop(peer, reason, now_s)

    def _drop(self, peer: Peer, reason: str, now_s: float) -> None:
        """It has ended, or has given up what it asked for: nobody waits for its requests."""
        _log.warning(log.event("api.gone", peer=peer.name, reason=reason))
        self._peers.remove(peer)
        self._scheduler.abort_all(peer.identity, now_s)


def refuse(hello: Hello, reason: str) -> Refused:
    """The answer to a peer that must end."""
    _log.warning(log.event("hello.refused", peer=hello.name, pid=hello.pid, reason=reason))
    return Refused(reason)


def refusal(hello: Hello, role: Role) -> Refused:
    if hello.protocol != PROTOCOL_VERSION:
        return refuse(
            hello,
            f"{hello.name} speaks protocol {hello.protocol}, this scheduler speaks "
            f"{PROTOCOL_VERSION}; run the same version of FreeToken everywhere",
        )
    return refuse(hello, f"{hello.name} is no {role.value}: it connected to the wrong socket")


def _overrun(request_id: str) -> Failed:
    message = "the api process did not read its tokens in time"
    return Failed(request_id, ErrorCode.ENGINE_UNAVAILABLE, message, None, 1.0)
