"""What a step's result does to its rows: tokens, pages for the tree, ends. Called by `apply`."""

from __future__ import annotations

from dataclasses import dataclass, field

from freetoken import log
from freetoken.scheduler.counters import Counters
from freetoken.scheduler.node import TOKEN_BYTES
from freetoken.scheduler.open import OpenRequests
from freetoken.scheduler.request import Request
from freetoken.scheduler.roster import Roster
from freetoken.scheduler.steps import Step
from freetoken.wire.messages import (
    Failed,
    FinishReason,
    Logprobs,
    StepMode,
    StepResult,
    TokenDelta,
    unpack_ids,
)

_log = log.get(__name__)


@dataclass(slots=True)
class Outputs:
    """What came of a step: deltas by api, failures, and why it failed if it did."""

    deltas: dict[bytes, list[TokenDelta]] = field(default_factory=dict)
    failed: list[tuple[bytes, Failed]] = field(default_factory=list)
    step_us: int = 0
    error: str | None = None
    probe_failed: bool = False


class ResultRows:
    """One result being dealt out to its rows, in the order of the plan."""

    def __init__(
        self,
        roster: Roster,
        requests: OpenRequests,
        counters: Counters,
        result: StepResult,
        now_s: float,
    ) -> None:
        self.outputs = Outputs(step_us=result.stats.step_us)
        self._roster = roster
        self._requests = requests
        self._counters = counters
        self._result = result
        self._ids = unpack_ids(result.token_ids)
        self._now_s = now_s

    def deal(self, step: Step) -> None:
        """Extends first, then decodes. Void rows only learn that their k/v are computed."""
        at = 0
        for request, kv_len, is_last in step.extends:
            request.kv_len = kv_len
            request.expert_bytes += self._result.stats.expert_bytes
            if not request.is_void:
                self._extended(request, step, is_last)
                if is_last:
                    self._take_token(request, at)
            at += is_last
        settle = self._roster.ledger.settle
        for request in step.decodes:
            request.kv_len += 1
            if not request.is_void:
                if request.kv_len == request.settle_at:
                    settle(request)
                self._take_token(request, at)
            at += 1

    def _extended(self, request: Request, step: Step, is_last: bool) -> None:
        if request.kv_len >= request.settle_at:
            self._roster.ledger.settle(request)
        if step.mode is StepMode.PASS:
            request.path = "pass"
        if is_last:
            self._roster.computed_all(request)
            self._log_extend(request)
        elif request.followers:
            self._roster.lead(request)

    def _take_token(self, request: Request, at: int) -> None:
        """Append the token sampled `at`, tell the api, and end the request if it is the last."""
        result = self._result
        token = result.token_ids[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]
        request.ids += token
        request.num_output += 1
        finish = None
        if self._ids[at] in request.stop_ids:
            finish = FinishReason.STOP
        elif request.num_output >= request.max_tokens:
            finish = FinishReason.LENGTH
        cached = None
        if request.first_token_s is None:
            request.first_token_s = self._now_s
            cached = request.cached_tokens
            if request.api is not None:
                self._counters.cached_tokens += cached or 0
        if request.api is not None:
            logprobs: tuple[Logprobs, ...] = ()
            if result.logprobs and (one := result.logprobs[at]) is not None:
                logprobs = (one,)
            self._counters.output_tokens += 1
            delta = TokenDelta(request.id, token, logprobs, cached, finish)
            deltas = self.outputs.deltas.get(request.api)
            if deltas is None:
                self.outputs.deltas[request.api] = [delta]
            else:
                deltas.append(delta)
        if finish is not None:
            self._requests.end(request, finish, self._now_s)

    def _log_extend(self, request: Request) -> None:
        if request.api is None or request.extend_planned_s is None:
            return
        _log.info(
            log.event(
                "extend",
                id=request.id,
                tokens=request.num_tokens - request.cached_len,
                cached=request.cached_len,
                path=request.path or StepMode.ON_DEMAND.value,
                ms=(self._now_s - request.extend_planned_s) * 1e3,
                bytes=request.expert_bytes,
            )
        )
