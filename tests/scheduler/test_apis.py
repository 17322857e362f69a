"""What the api side does with answers that an api's queue refuses."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, cast

import zmq

from freetoken.scheduler.apis import ApiSide
from freetoken.scheduler.peers import PeerTable
from freetoken.wire.messages import PROTOCOL_VERSION, Failed, Hello, Message, Role, Submit
from tests.fakes.worker import WorkerScript
from tests.scheduler.drive import API, Driver, pack_ids, sampling


class ScriptedRouter:
    """Hands in `incoming`; `refusals` says, send by send, whether the queue is full."""

    def __init__(self, incoming: Iterable[Message]) -> None:
        self.incoming = list(incoming)
        self.refusals: list[bool] = []
        self.sent: list[Message] = []

    def receive(self) -> tuple[bytes, Message] | None:
        return (API, self.incoming.pop(0)) if self.incoming else None

    def send(self, peer: bytes, message: Message) -> bool:
        if self.refusals and self.refusals.pop(0):
            return False
        self.sent.append(message)
        return True


class SilentBeats:
    def forget(self, name: str) -> None:
        pass


def test_a_stream_that_lost_tokens_never_ends_well() -> None:
    """The queue is full for the first of two results and has room again for the second."""
    driver = Driver(WorkerScript())
    hello = Hello(PROTOCOL_VERSION, Role.API, "api", os.getpid())
    router = ScriptedRouter([hello, Submit("a", pack_ids([1, 2]), 2, sampling())])
    peers = PeerTable(zmq.Poller(), cast(Any, SilentBeats()))
    side = ApiSide(cast(Any, router), peers, driver.scheduler, 1)
    side.receive(0.0)
    side.flush(0.0)
    router.sent.clear()
    router.refusals = [True, False]
    for _ in range(2):
        assert driver.plan() is not None
        result = driver.in_flight.popleft()
        assert not isinstance(result, int)
        outputs = driver.scheduler.apply(result, 0.0)
        assert outputs is not None
        side.post(outputs)
    side.flush(0.0)
    assert [type(message) for message in router.sent] == [Failed]
    assert driver.scheduler.num_open == 0
    for peer in peers.all():
        peers.remove(peer)
