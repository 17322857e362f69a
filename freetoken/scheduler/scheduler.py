"""The scheduler: owns every token of every open request, and decides each step.

    attach / detach       a worker is ready, a worker is lost
    submit / abort        from the apis
    plan                  the next step for the worker, at most two in flight
    apply / fail_step     what came of the oldest step in flight

No I/O; the clock is an argument. The I/O loop (process.py) is the only caller. The life of a
request: WAITING (queue) → EXTENDING → DECODING (roster) → LEAVING → GONE; pages move in the
ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from freetoken import log
from freetoken.errors import ErrorCode, RequestError
from freetoken.scheduler.admission import LikelyOutput, WaitQueue
from freetoken.scheduler.chunks import StepLimits
from freetoken.scheduler.counters import Counters
from freetoken.scheduler.intake import Intake
from freetoken.scheduler.ledger import Ledger
from freetoken.scheduler.open import OpenRequests
from freetoken.scheduler.pace import Fairness, Pace
from freetoken.scheduler.results import Outputs, ResultRows
from freetoken.scheduler.roster import Roster
from freetoken.scheduler.steps import Step, StepDraft
from freetoken.wire.messages import (
    Accepted,
    Failed,
    FinishReason,
    StepPlan,
    StepResult,
    Submit,
    TokenDelta,
    WorkerReady,
)

_log = log.get(__name__)

MAX_IN_FLIGHT = 2
DEFAULT_FAIRNESS = Fairness()
RETRY_UNAVAILABLE_S = 5.0


@dataclass(slots=True)
class _Engine:
    """All that lives as long as one worker does."""

    worker: WorkerReady
    limits: StepLimits
    pace: Pace
    roster: Roster
    requests: OpenRequests


class Scheduler:
    """`make_seed` gives seeds to requests without one."""

    def __init__(
        self,
        max_queued_requests: int,
        max_queued_tokens: int,
        make_seed: Callable[[], int],
        fairness: Fairness = DEFAULT_FAIRNESS,
    ) -> None:
        self.counters = Counters()
        self.journal = log.Journal(_log)  # of what happens in steps; the I/O loop writes it
        self.last_token_s: float | None = None  # when a token last came through this worker
        self._max_queued = (max_queued_requests, max_queued_tokens)
        self._intake = Intake(make_seed)
        self._fairness = fairness
        self._likely = LikelyOutput()
        self._engine: _Engine | None = None
        self._steps: deque[Step] = deque()
        self._next_step = 0
        self._unavailable = "no worker is ready"

    # ------------------------------------------------------------ state

    @property
    def worker(self) -> WorkerReady | None:
        return self._engine.worker if self._engine else None

    @property
    def num_running(self) -> int:
        return self._engine.roster.num_running if self._engine else 0

    @property
    def num_waiting(self) -> int:
        return self._engine.roster.queue.num_requests if self._engine else 0

    @property
    def num_open(self) -> int:
        """Requests without a terminal message, the probe included."""
        return len(self._engine.requests) if self._engine else 0

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def oldest_step_s(self) -> float | None:
        """When the step whose result comes next was planned; None if none is out."""
        return self._steps[0].planned_s if self._steps else None

    def gauges(self) -> dict[str, float]:
        """`EngineState.counters`, see counters.py."""
        values: dict[str, float] = asdict(self.counters)
        free, cached, used = 0, 0, 0
        if self._engine is not None:
            ledger = self._engine.roster.ledger
            free, cached = ledger.pool.num_free, ledger.tree.num_evictable
            used = ledger.pool.num_pages - free - cached
        values |= {"pages_free": free, "pages_cached": cached, "pages_used": used}
        values |= {"running": self.num_running, "waiting": self.num_waiting}
        return values

    def check(self) -> None:
        """Assert the accounting of every page and row; takes time with the size of the tree."""
        if self._engine is not None:
            self._engine.roster.check()

    def check_idle(self) -> None:
        """Assert that nothing is lost, if nothing is open or in flight."""
        engine = self._engine
        if engine is not None and not engine.requests and not self._steps:
            engine.roster.ledger.check_idle()
            engine.roster.check()

    # ------------------------------------------------------------ the worker

    def attach(self, worker: WorkerReady) -> None:
        """A worker can run steps; its pages are empty."""
        assert self._engine is None, "detach the old worker first"
        ledger = Ledger(worker.num_pages, worker.page_size, worker.max_rows, worker.context_tokens)
        roster = Roster(ledger, WaitQueue(*self._max_queued), self._likely, self.counters)
        limits = StepLimits(
            worker.max_step_tokens, worker.max_pass_tokens, worker.max_on_demand_tokens
        )
        requests = OpenRequests(roster, self.counters, self.journal)
        self.last_token_s = None
        self._engine = _Engine(worker, limits, Pace(self._fairness), roster, requests)

    def detach(self, reason: str, now_s: float) -> list[tuple[bytes, Failed]]:
        """The worker is lost, and with it every page: all open requests fail."""
        self._unavailable = reason
        if self._engine is None:
            return []
        self.counters.workers_lost += 1
        failed: list[tuple[bytes, Failed]] = []
        for request in self._engine.requests:
            message = self._engine.requests.fail(request, _unavailable(reason), now_s)
            if message is not None and request.api is not None:
                failed.append((request.api, message))
        self._engine = None
        self._steps.clear()
        return failed

    # ------------------------------------------------------------ requests

    def submit(self, api: bytes, submit: Submit, now_s: float) -> Accepted | Failed:
        """Queue a request, or say why it cannot be served."""
        try:
            engine = self._engine
            if engine is None:
                raise _unavailable(self._unavailable)
            if engine.requests.get(submit.request_id) is not None:
                message = f"request id {submit.request_id} is in use"
                raise RequestError(ErrorCode.INVALID_REQUEST, message, param="request_id")
            roster = engine.roster
            request = self._intake.take(
                api, submit, engine.worker, roster.ledger, roster.queue, now_s
            )
        except RequestError as error:
            self.counters.requests_refused += 1
            if error.code is not ErrorCode.CONTEXT_LENGTH_EXCEEDED:  # that one is a warning
                _log.info(log.event("request.refused", id=submit.request_id, code=error.code))
            return Failed(
                submit.request_id, error.code, error.message, error.param, error.retry_after_s
            )
        engine.requests.add(request)
        return Accepted(request.id, request.prompt_tokens, request.max_tokens)

    def abort(self, api: bytes, request_id: str, now_s: float) -> TokenDelta | None:
        """End a request of `api`; its terminal delta, or None if it is not open."""
        request = self._engine.requests.get(request_id) if self._engine else None
        if self._engine is None or request is None or request.api != api:
            return None
        self._engine.requests.end(request, FinishReason.ABORT, now_s)
        return TokenDelta(request_id, b"", finish_reason=FinishReason.ABORT)

    def abort_all(self, api: bytes, now_s: float) -> list[str]:
        """`api` cannot be reached: end all its requests; their ids."""
        if self._engine is None:
            return []
        for request in (mine := [r for r in self._engine.requests if r.api == api]):
            self._engine.requests.end(request, FinishReason.ABORT, now_s)
        return [request.id for request in mine]

    def probe(self, now_s: float) -> None:
        """Queue a generation of one token that no api sees; `last_token_s` tells if it came."""
        assert self._engine is not None
        self._engine.requests.add(self._intake.make_probe(now_s))

    # ------------------------------------------------------------ steps

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None if there is nothing to do before the next result."""
        engine = self._engine
        if engine is None or len(self._steps) >= MAX_IN_FLIGHT:
            return None
        roster = engine.roster
        roster.admit()
        draft = StepDraft(self._next_step, now_s, engine.limits, engine.worker.num_layers)
        draft.fill(roster, engine.pace)
        if draft.is_empty:
            has_work = roster.num_running or roster.queue.num_requests
            assert self._steps or not has_work, "requests wait for what cannot happen"
            return None
        self._next_step += 1
        self._steps.append(draft.step)
        forget_rows, roster.forget_rows = roster.forget_rows, []
        return draft.finish(engine.worker.epoch, forget_rows)

    def apply(self, result: StepResult, now_s: float) -> Outputs | None:
        """Take the result of a step in flight; None, and no effect, if it is another's."""
        engine = self._engine
        if engine is None or not self._catch_up(result.step_id):
            return None
        step = self._steps[0]
        if not _matches(result, step):
            what = f"the worker's result of step {step.step_id} does not match its plan"
            return self.fail_step(step.step_id, what, now_s)
        self._steps.popleft()
        self.counters.count(result)
        self.counters.passes += step.is_last_part
        if step.charge is not None:
            engine.pace.settle(step.charge, result.stats.step_us / 1e3)
        threshold = result.max_on_demand_tokens
        if threshold != engine.limits.max_on_demand_tokens:
            engine.limits = replace(engine.limits, max_on_demand_tokens=threshold)
        rows = ResultRows(
            engine.roster, engine.requests, self.counters, self.journal, result, now_s
        )
        rows.deal(step)
        self.counters.output_tokens += sum(map(len, rows.outputs.deltas.values()))
        self._close_step(engine, step)
        if step.sampled_rows:
            self.last_token_s = now_s
        return rows.outputs

    def fail_step(self, step_id: int | None, message: str, now_s: float) -> Outputs | None:
        """A step in flight failed, and with it its rows; the others go on. Rows that decoded
        beside an extend, which asks for more, extend again instead.
        None, and no effect, if `step_id` is no step in flight (None: the oldest one).
        """
        engine = self._engine
        if engine is None or not self._catch_up(step_id):
            return None
        step = self._steps.popleft()
        self.counters.steps_failed += 1
        outputs = Outputs(error=message)
        for request in step.decodes if step.extends else ():
            if not request.is_void:
                engine.roster.start_over(request)
        error = RequestError(ErrorCode.STEP_FAILED, message)
        for request in step.requests():
            request.keeps = False  # what the next step adds would rest on what is not there
            if request.is_void:
                continue
            failed = engine.requests.fail(request, error, now_s)
            if failed is not None and request.api is not None:
                outputs.failed.append((request.api, failed))
            else:
                outputs.probe_failed = True
        self._close_step(engine, step)
        return outputs

    def _catch_up(self, step_id: int | None) -> bool:
        """Make `step_id` the oldest step in flight; False if it is none. The worker answers in
        order: of those before it the results were lost on their way."""
        if not self._steps or step_id not in (None, *(step.step_id for step in self._steps)):
            return False
        while step_id not in (None, self._steps[0].step_id):
            self.lose_result()
        return True

    def lose_result(self) -> None:
        """The result of the oldest step in flight will not come. Its rows extend again, as after
        a preemption: the same tokens are drawn."""
        engine = self._engine
        assert engine is not None
        step = self._steps.popleft()
        _log.warning(log.event("step.lost", step=step.step_id))
        for request in step.requests():
            request.keeps = False
            if not request.is_void:
                engine.roster.start_over(request)
        self._close_step(engine, step)

    def _close_step(self, engine: _Engine, step: Step) -> None:
        for copy in step.copies:
            engine.roster.ledger.end_copy(copy)
        engine.roster.step_done(step.step_id)


def _matches(result: StepResult, step: Step) -> bool:
    return (
        result.row_ids == step.sampled_rows
        and len(result.token_ids) == len(result.row_ids)
        and (not result.logprobs or 4 * len(result.logprobs) == len(result.row_ids))
    )


def _unavailable(reason: str) -> RequestError:
    return RequestError(
        ErrorCode.ENGINE_UNAVAILABLE,
        f"the engine is not available: {reason}",
        retry_after_s=RETRY_UNAVAILABLE_S,
    )
