"""What a step's result does to its rows: tokens, pages for the tree, ends. Called by `apply`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat

from freetoken.log import Journal
from freetoken.scheduler.counters import Counters
from freetoken.scheduler.open import OpenRequests
from freetoken.scheduler.request import Request
from freetoken.scheduler.roster import Roster
from freetoken.scheduler.steps import Step
from freetoken.wire.messages import (
    Failed,
    FinishReason,
    StepMode,
    StepResult,
    TokenDelta,
    split_ids,
    unpack_ids,
)


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
        journal: Journal,
        result: StepResult,
        now_s: float,
    ) -> None:
        self.outputs = Outputs(step_us=result.stats.step_us)
        self._roster = roster
        self._requests = requests
        self._counters = counters
        self._journal = journal
        self._result = result
        self._now_s = now_s

    def deal(self, step: Step) -> None:
        """Extends first, then decodes. Void rows only learn that their k/v are computed."""
        for request in step.extending():
            self._count_cost(request)
        sampled = []
        for request, kv_len, is_last in step.extends:
            request.kv_len = kv_len
            if not request.is_void:
                self._extended(request, step, is_last)
            if is_last:
                sampled.append(request)
        settle = self._roster.ledger.settle
        for request in step.decodes:
            request.kv_len = kv_len = request.kv_len + 1
            if kv_len == request.settle_at and not request.is_void:
                settle(request)
        self._take_tokens(sampled + step.decodes)

    def _count_cost(self, request: Request) -> None:
        stats = self._result.stats
        request.expert_bytes += stats.expert_bytes
        request.slot_hits += stats.slot_hits
        request.slot_misses += stats.slot_misses
        request.distinct_experts += stats.distinct_experts

    def _extended(self, request: Request, step: Step, is_last: bool) -> None:
        if request.kv_len >= request.settle_at:
            self._roster.ledger.settle(request)
        if step.mode is StepMode.PASS:
            request.path = "pass"
        if is_last:
            self._roster.computed_all(request)
            self._note_extend(request)
        elif request.followers:
            self._roster.lead(request)

    def _take_tokens(self, sampled: list[Request]) -> None:
        """Append a token to each row, tell the apis, and end the requests whose last it is.

        This loop sees every row of every step: keep it small.
        """
        result, all_deltas = self._result, self.outputs.deltas
        tokens, ids = split_ids(result.token_ids), unpack_ids(result.token_ids)
        logprobs = result.logprobs or repeat(None)
        for request, token, token_id, one in zip(sampled, tokens, ids, logprobs, strict=False):
            if request.is_void:
                continue
            request.ids += token
            request.num_output = num_output = request.num_output + 1
            finish = None
            if token_id in request.stop_ids:
                finish = FinishReason.STOP
            elif num_output >= request.max_tokens:
                finish = FinishReason.LENGTH
            api = request.api
            if api is not None:
                cached = self._note_first(request) if num_output == 1 else None
                delta = TokenDelta(request.id, token, () if one is None else (one,), cached, finish)
                if api in all_deltas:
                    all_deltas[api].append(delta)
                else:
                    all_deltas[api] = [delta]
            if finish is not None:
                self._requests.end(request, finish, self._now_s)

    def _note_first(self, request: Request) -> int:
        """The prompt tokens found in the cache, which go with the first token."""
        request.first_token_s = self._now_s
        cached = request.cached_tokens or 0
        self._counters.cached_tokens += cached
        return cached

    def _note_extend(self, request: Request) -> None:
        if request.api is None or request.extend_planned_s is None:
            return
        self._journal.info(
            "extend",
            id=request.id,
            tokens=request.num_tokens - request.cached_len,
            cached=request.cached_len,
            path=request.path or StepMode.ON_DEMAND.value,
            ms=(self._now_s - request.extend_planned_s) * 1e3,
            bytes=request.expert_bytes,
            hits=request.slot_hits,
            misses=request.slot_misses,
            distinct=request.distinct_experts,
        )
