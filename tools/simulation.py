"""The real scheduler on a simulated clock, between made-up clients and a worker that only costs
time. Deterministic: the clock moves from event to event, and ties are ordered.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random

from fake_steps import answer
from sim_traces import Conversation
from sim_worker import CostedWorker, Rig

from freetoken.scheduler.pace import Fairness
from freetoken.scheduler.results import Outputs
from freetoken.scheduler.scheduler import Scheduler
from freetoken.wire.messages import (
    Accepted,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    TokenDelta,
    WorkerReady,
    pack_ids,
)

API = b"clients"
PAGE_SIZE = 16
VOCAB_SIZE = 150_000
MAX_STEP_TOKENS = 2048
LIMITS = (10**6, 10**9)


@dataclass(frozen=True, slots=True)
class Policy:
    """How prompts are computed. `max_pass_tokens`: of one pass · `extend_threshold`: new tokens up
    to which a step is on demand, None: as the worker finds it · `pauses`: whether a pass may be
    left between layers."""

    name: str
    title: str
    max_pass_tokens: int
    extend_threshold: int | None = None
    pauses: bool = False
    fairness: Fairness = field(default_factory=Fairness)


@dataclass(frozen=True, slots=True)
class Seats:
    """What the worker has room for."""

    pool_tokens: int
    max_rows: int


@dataclass(slots=True)
class Answer:
    """One turn as its client saw it."""

    kind: str
    sent_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    token_ids: bytes = b""
    came_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.came_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.came_s)]


@dataclass(slots=True)
class Talk:
    """A conversation under way."""

    plan: Conversation
    said: array[int]
    next_turn: int = 0


class Simulation:
    """One policy on one trace. `answers` are the finished turns in the order of their ends."""

    def __init__(
        self, trace: Sequence[Conversation], rig: Rig, seats: Seats, policy: Policy, seed: int
    ) -> None:
        self.answers: list[Answer] = []
        self.num_refused = 0
        self.now_s = 0.0
        self.busy_s = 0.0
        self._seed = seed
        self._num_parts = rig.work.routed.num_layers if policy.pauses else 1
        self._worker = CostedWorker(rig, self._num_parts)
        self._threshold = policy.extend_threshold
        if self._threshold is None:
            self._threshold = rig.threshold(MAX_STEP_TOKENS)
        seeds = count(1)
        self.scheduler = Scheduler(*LIMITS, lambda: next(seeds), policy.fairness)
        self.scheduler.attach(_make_ready(seats, policy, self._threshold, self._num_parts))
        self._numbers = count()
        self._turns: list[tuple[float, int, Talk]] = []  # when each is sent
        self._steps: deque[tuple[float, StepResult]] = deque()  # and when each ends
        self._open: dict[str, tuple[Talk, Answer]] = {}
        self._free_s = 0.0  # when the worker has done all it was told
        for conversation in trace:
            talk = Talk(conversation, self._first_ids(conversation))
            heappush(self._turns, (conversation.start_s, next(self._numbers), talk))

    def run(self) -> None:
        """Until every conversation is over."""
        while True:
            while (plan := self.scheduler.plan(self.now_s)) is not None:
                self._start_step(plan)
            step_s = self._steps[0][0] if self._steps else None
            if self._turns and (step_s is None or self._turns[0][0] < step_s):
                self.now_s, _, talk = heappop(self._turns)
                self._send(talk)
            elif step_s is not None:
                self.now_s, result = self._steps.popleft()
                outputs = self.scheduler.apply(result, self.now_s)
                assert outputs is not None
                self._take(outputs)
            else:
                break
        assert not self._open, "a request was never answered"
        self.scheduler.check_idle()

    # ------------------------------------------------------------ the worker

    def _start_step(self, plan: StepPlan) -> None:
        seconds, stats = self._worker.cost(plan)
        self._free_s = max(self._free_s, self.now_s) + seconds
        self.busy_s += seconds
        result = answer(plan, self._draw, stats, self._threshold, self._num_parts)
        self._steps.append((self._free_s, result))

    def _draw(self, rows: Sequence[int]) -> array[int]:
        """No two answers are alike."""
        return array("i", (next(self._numbers) * 7919 % VOCAB_SIZE for _ in rows))

    # ------------------------------------------------------------ the clients

    def _first_ids(self, conversation: Conversation) -> array[int]:
        """What all conversations with this prefix begin with."""
        return _random_ids(f"{self._seed}-prefix-{conversation.prefix}", conversation.prefix_tokens)

    def _send(self, talk: Talk) -> None:
        turn = talk.plan.turns[talk.next_turn]
        talk.next_turn += 1
        number = next(self._numbers)
        talk.said.extend(
            _random_ids(f"{self._seed}-{talk.plan.start_s}-{talk.next_turn}", turn.new_tokens)
        )
        request = Submit(
            f"turn-{number}", pack_ids(talk.said), turn.output_tokens, Sampling(seed=number)
        )
        answered = self.scheduler.submit(API, request, self.now_s)
        if isinstance(answered, Accepted):
            self._open[request.request_id] = (
                talk,
                Answer(talk.plan.kind, self.now_s, len(talk.said)),
            )
        else:
            self.num_refused += 1  # it has outgrown the context: the conversation ends

    def _take(self, outputs: Outputs) -> None:
        assert not outputs.failed
        for delta in outputs.deltas.get(API, ()):
            self._take_delta(delta)

    def _take_delta(self, delta: TokenDelta) -> None:
        talk, answered = self._open[delta.request_id]
        answered.came_s.append(self.now_s)
        answered.token_ids += delta.token_ids
        if delta.cached_tokens is not None:
            answered.cached_tokens = delta.cached_tokens
        if delta.finish_reason is None:
            return
        del self._open[delta.request_id]
        self.answers.append(answered)
        talk.said.frombytes(answered.token_ids)
        if talk.next_turn < len(talk.plan.turns):
            send_s = self.now_s + talk.plan.turns[talk.next_turn].think_s
            heappush(self._turns, (send_s, next(self._numbers), talk))


def _random_ids(seed: str, num_tokens: int) -> array[int]:
    return array("i", Random(seed).choices(range(VOCAB_SIZE), k=num_tokens))


def _make_ready(seats: Seats, policy: Policy, threshold: int, num_layers: int) -> WorkerReady:
    num_pages = seats.pool_tokens // PAGE_SIZE
    return WorkerReady(
        epoch=1,
        model="simulated",
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_rows=seats.max_rows,
        window=num_pages * PAGE_SIZE,
        context_tokens=num_pages * PAGE_SIZE,
        context_flag="",
        vocab_size=VOCAB_SIZE,
        num_layers=num_layers,
        max_step_tokens=MAX_STEP_TOKENS,
        max_pass_tokens=policy.max_pass_tokens,
        max_on_demand_tokens=threshold,
        plan={},
    )
