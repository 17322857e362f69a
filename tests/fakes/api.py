"""A stand-in for an api process: one DEALER that says hello and keeps what it is told."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq

from freetoken.wire.beats import BeatClient
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Beat,
    EngineState,
    Failed,
    Hello,
    Message,
    Phase,
    Refused,
    Role,
    Sampling,
    Submit,
    TokenDelta,
    Tokens,
    Welcome,
    pack_ids,
    unpack_ids,
)
from freetoken.wire.sockets import Dealer, Endpoints, connect_dealer

PATIENCE_S = 10.0


class FakeApi:
    """Synchronous: every wait reads messages until its condition holds, or fails the test."""

    def __init__(self, run_dir: Path, pid: int | None = None) -> None:
        endpoints = Endpoints.in_directory(run_dir)
        self.name = f"api-{os.getpid()}-{secrets.token_hex(3)}"
        self.pid = os.getpid() if pid is None else pid
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        beat = Beat(self.name, self.pid, 0, Phase.READY, "", 0, 0)
        self._beats = BeatClient(self._context, endpoints.beats, self.name, lambda: beat)
        self.socket = connect_dealer(self._context, endpoints.api, self.name)
        self.dealer = Dealer(self.socket)
        self.welcome: Welcome | None = None
        self.refused: str | None = None
        self.states: list[EngineState] = []
        self.accepted: dict[str, Accepted] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.failed: dict[str, list[Failed]] = {}

    def __enter__(self) -> FakeApi:
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._beats.stop()
        self.socket.close(0)
        self._context.term()

    # ------------------------------------------------------------ to the scheduler

    def hello(self, protocol: int = PROTOCOL_VERSION, role: Role = Role.API) -> FakeApi:
        self.dealer.send(Hello(protocol, role, self.name, self.pid))
        return self

    def connect(self) -> FakeApi:
        self.hello()
        self.wait_for(lambda: self.welcome is not None)
        return self

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int],
        max_tokens: int | None = 4,
        sampling: Sampling | None = None,
    ) -> None:
        chosen = sampling or Sampling(temperature=0.0, seed=7)
        self.dealer.send(Submit(request_id, pack_ids(prompt), max_tokens, chosen))

    def abort(self, request_id: str) -> None:
        self.dealer.send(Abort(request_id))

    # ------------------------------------------------------------ from the scheduler

    def wait_for(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline_s, f"waited {patience_s} s in vain"
            message = self.dealer.receive(20)
            if message is not None:
                self._note(message)

    def wait_phase(self, phase: Phase, patience_s: float = PATIENCE_S) -> EngineState:
        """The first EngineState from now on with that phase (or the last one, if it has it)."""
        self.wait_for(lambda: bool(self.states) and self.states[-1].phase is phase, patience_s)
        return self.states[-1]

    def wait_end(self, *request_ids: str, patience_s: float = PATIENCE_S) -> None:
        self.wait_for(lambda: all(self.is_done(i) for i in request_ids), patience_s)

    def is_done(self, request_id: str) -> bool:
        deltas = self.deltas.get(request_id)
        return request_id in self.failed or bool(deltas and deltas[-1].finish_reason)

    def text(self, request_id: str) -> list[int]:
        return [t for delta in self.deltas[request_id] for t in unpack_ids(delta.token_ids)]

    def complete(
        self, request_id: str, prompt: Iterable[int], max_tokens: int | None = 4
    ) -> list[int]:
        """A whole request: the small control request at the end of a case."""
        self.submit(request_id, prompt, max_tokens)
        self.wait_end(request_id)
        assert request_id not in self.failed, self.failed[request_id]
        return self.text(request_id)

    def _note(self, message: Message) -> None:
        match message:
            case Welcome():
                self.welcome = message
            case Refused():
                self.refused = message.reason
            case EngineState():
                self.states.append(message)
            case Accepted():
                self.accepted[message.request_id] = message
            case Tokens():
                for delta in message.deltas:
                    self.deltas.setdefault(delta.request_id, []).append(delta)
            case Failed():
                self.failed.setdefault(message.request_id, []).append(message)
            case _:
                raise AssertionError(f"no message for an api: {message}")
