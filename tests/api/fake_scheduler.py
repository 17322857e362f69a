"""A scripted scheduler over real ipc sockets: welcomes apis, records what they ask, answers.

`reply` decides what a Submit is answered with; `say` sends anything at any time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zmq

from freetoken.wire.beats import BeatServer
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Beat,
    EngineState,
    Failed,
    FinishReason,
    Hello,
    Logprobs,
    Message,
    Phase,
    Refused,
    Submit,
    TokenDelta,
    Tokens,
    Welcome,
    pack_ids,
    unpack_ids,
)
from freetoken.wire.sockets import Endpoints, Router, bind_router

WAIT_S = 10.0
REPORT_S = 0.5
Reply = Callable[[Submit], Iterable[Message]]


def accept(submit: Submit) -> Accepted:
    num_prompt = len(unpack_ids(submit.prompt_ids))
    return Accepted(submit.request_id, num_prompt, submit.max_tokens or 1000)


def delta(
    request_id: str,
    ids: Sequence[int],
    finish: FinishReason | None = None,
    cached: int | None = None,
    logprobs: tuple[Logprobs, ...] = (),
) -> Tokens:
    return Tokens((TokenDelta(request_id, pack_ids(ids), logprobs, cached, finish),), 1000)


def saying(ids: Sequence[int], finish: FinishReason = FinishReason.STOP, cached: int = 0) -> Reply:
    """Accept, then one message a token."""

    def reply(submit: Submit) -> list[Message]:
        messages: list[Message] = [accept(submit)]
        for position, token_id in enumerate(ids):
            is_last = position == len(ids) - 1
            messages.append(
                delta(
                    submit.request_id,
                    [token_id],
                    finish if is_last else None,
                    cached if position == 0 else None,
                )
            )
        return messages

    return reply


def accept_only(submit: Submit) -> list[Message]:
    return [accept(submit)]


def ready(context_tokens: int = 1024, counters: dict[str, float] | None = None) -> EngineState:
    return EngineState(Phase.READY, "", 10, 10, context_tokens, 0, 0, counters or {})


class FakeScheduler:
    """One life of a scheduler; `stop` ends it."""

    def __init__(
        self, run_dir: Path, state: EngineState | None = None, *, epoch: int = 1, pid: int = 0
    ) -> None:
        self.reply: Reply = accept_only
        self.state = state or ready()
        self.refusal: str | None = None
        self.forgets = False  # whoever said hello so far
        self.submits: list[Submit] = []
        self.aborts: list[str] = []
        self.hellos: list[Hello] = []
        self._epoch = epoch
        self._pid = pid or os.getpid()
        self._peers: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoints = Endpoints.in_directory(run_dir)
        self._router = Router(bind_router(self._context, endpoints.api))
        self._beats = BeatServer(self._context, endpoints.beats, self._beat)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind("inproc://outgoing")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect("inproc://outgoing")
        self._outgoing: list[tuple[bytes | None, Message | bytes]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._beats.start()
        self._thread.start()

    def reset(self) -> None:
        """As new, for the next test."""
        with self._changed:
            self.reply = accept_only
            self.submits.clear()
            self.aborts.clear()
        if self.state != ready():
            self.set_state(ready())

    def stop(self) -> None:
        if self._thread.is_alive():
            self._outbox.send(b"stop")
            self._thread.join()
            self._outbox.close(0)
            self._beats.stop()
            self._context.destroy(linger=0)

    def say(self, message: Message | bytes, request_id: str | None = None) -> None:
        """To the api that sent `request_id`, or the message's; to the newest api otherwise."""
        if isinstance(message, Tokens):
            request_id = request_id or message.deltas[0].request_id
        elif isinstance(message, Accepted | Failed):
            request_id = message.request_id
        with self._changed:
            peer = self._peers.get(request_id or "")
            self._outgoing.append((peer, message))
            self._outbox.send(b"go")

    def set_state(self, state: EngineState) -> None:
        self.state = state
        self.say(state)

    def wait_for(self, is_so: Callable[[FakeScheduler], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_so(self), WAIT_S), "waited in vain"

    def wait_submit(self, index: int = 0) -> Submit:
        self.wait_for(lambda fake: len(fake.submits) > index)
        return self.submits[index]

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._inbox, zmq.POLLIN)
        self._newest = b""
        self._reported_s = time.monotonic()
        while True:
            events = dict(poller.poll(int(REPORT_S * 1000)))
            if self._inbox in events and self._inbox.recv() == b"stop":
                break
            while (received := self._router.receive()) is not None:
                self._take(*received)
            with self._changed:
                outgoing, self._outgoing = self._outgoing, []
            for peer, message in outgoing:
                self._send(peer or self._newest, message)
            if self._newest and not self.forgets and time.monotonic() > self._reported_s + REPORT_S:
                self._reported_s = time.monotonic()
                self._send(self._newest, self.state)
        self._router.socket.close(0)
        self._inbox.close(0)

    def _take(self, peer: bytes, message: Message) -> None:
        answers: list[Message] = []
        with self._changed:
            if isinstance(message, Hello):
                self._newest = peer
                self.forgets = False
                self.hellos.append(message)
                if self.refusal is not None:
                    answers = [Refused(self.refusal)]
                else:
                    answers = [Welcome(PROTOCOL_VERSION, self._pid, self._epoch), self.state]
            elif isinstance(message, Submit):
                self.submits.append(message)
                self._peers[message.request_id] = peer
                answers = list(self.reply(message))
            elif isinstance(message, Abort):
                self.aborts.append(message.request_id)
                answers = [delta(message.request_id, [], FinishReason.ABORT)]
            self._changed.notify_all()
        for answer in answers:
            self._send(peer, answer)

    def _send(self, peer: bytes, message: Message | bytes) -> None:
        if isinstance(message, bytes):
            self._router.socket.send_multipart([peer, message], zmq.NOBLOCK)
        else:
            self._router.send(peer, message)

    def _beat(self) -> Beat:
        return Beat("scheduler", self._pid, self._epoch, Phase.READY, "", 0, 0)
