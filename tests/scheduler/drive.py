"""Drives a Scheduler with the fake model, keeping two steps in flight, and collects the outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import msgspec

from freetoken.scheduler.pace import Fairness
from freetoken.scheduler.results import Outputs
from freetoken.scheduler.scheduler import Scheduler
from freetoken.wire.messages import (
    Accepted,
    Failed,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from tests.fakes.model import complete
from tests.fakes.worker import WorkerScript, finish, make_model, make_ready

API = b"api-1"


def sampling(**fields: object) -> Sampling:
    """Greedy, without stop ids."""
    return msgspec.structs.replace(Sampling(temperature=0.0, seed=7), **fields)


class Driver:
    """`now_s` advances with every step by what the script says, or a millisecond; `check()` runs
    after every event."""

    def __init__(
        self,
        script: WorkerScript,
        max_queued: tuple[int, int] = (1000, 10**6),
        fairness: Fairness | None = None,
    ) -> None:
        self.script = script
        self.now_s = 0.0
        seeds = count(1)
        self.scheduler = Scheduler(*max_queued, lambda: next(seeds), fairness or Fairness())
        self.model = make_model(script)
        self.scheduler.attach(make_ready(script))
        self.plans: list[StepPlan] = []
        self.fails: Callable[[StepPlan], bool] = lambda plan: False
        self.in_flight: deque[StepResult | int] = deque()  # an int: the step that failed
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.token_s: dict[str, list[float]] = {}  # when each token came
        self.failed: dict[str, Failed] = {}
        self.accepted: dict[str, Accepted] = {}
        self.sampling_of: dict[str, Sampling] = {}

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int],
        max_tokens: int | None = None,
        api: bytes = API,
        salt: str | None = None,
        priority: int = 0,
        **fields: object,
    ) -> Accepted | Failed:
        message = Submit(
            request_id, pack_ids(prompt), max_tokens, sampling(**fields), salt, priority
        )
        answer = self.scheduler.submit(api, message, self.now_s)
        if isinstance(answer, Accepted):
            self.accepted[request_id] = answer
            self.deltas[request_id] = []
            self.token_s[request_id] = []
            self.sampling_of[request_id] = message.sampling
        else:
            self.failed[request_id] = answer
        self.scheduler.check()
        return answer

    def abort(self, request_id: str, api: bytes = API) -> None:
        delta = self.scheduler.abort(api, request_id, self.now_s)
        if delta is not None:
            self._note(delta)
        self.scheduler.check()

    def plan(self, fails: bool = False) -> StepPlan | None:
        """Plan a step and run it in the model; its result, or failure, waits for `apply`."""
        plan = self.scheduler.plan(self.now_s)
        self.scheduler.check()
        if plan is not None:
            self.plans.append(plan)
            if fails or self.fails(plan):
                self.model.fail(plan)
                self.in_flight.append(plan.step_id)
                return plan
            result = self.model.run(plan)
            self.in_flight.append(finish(self.script, plan, result))
        return plan

    def apply(self) -> None:
        back = self.in_flight.popleft()
        self.now_s += 0.001 if isinstance(back, int) else back.stats.step_us / 1e6
        if isinstance(back, int):
            self._take(self.scheduler.fail_step(back, "out of memory", self.now_s))
        else:
            self._take(self.scheduler.apply(back, self.now_s))

    def lose_result(self) -> None:
        """The oldest one does not arrive. It is missed when the next does, or when none is left."""
        self.in_flight.popleft()
        while not self.in_flight and self.scheduler.num_in_flight:
            self.scheduler.lose_result()
        self.scheduler.check()

    def lose_worker(self) -> list[tuple[bytes, Failed]]:
        """The worker dies and another takes its place."""
        failed = self.scheduler.detach("it died", self.now_s)
        self.in_flight.clear()
        for _, message in failed:
            assert not self.is_done(message.request_id)
            self.failed[message.request_id] = message
        self.model = make_model(self.script)
        self.scheduler.attach(make_ready(self.script))
        return failed

    def step(self) -> bool:
        """Plan up to two steps ahead and take one result; False when all is done."""
        while self.plan() is not None:
            pass
        if not self.in_flight:
            return False
        self.apply()
        return True

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def _take(self, outputs: Outputs | None) -> None:
        assert outputs is not None
        for deltas in outputs.deltas.values():
            for delta in deltas:
                self._note(delta)
        self.scheduler.journal.write()
        for _, failed in outputs.failed:
            assert not self.is_done(failed.request_id)
            self.failed[failed.request_id] = failed
        self.scheduler.check()

    def _note(self, delta: TokenDelta) -> None:
        assert not self.is_done(delta.request_id), "a delta after the terminal message"
        self.deltas[delta.request_id].append(delta)
        self.token_s[delta.request_id] += [self.now_s] * (len(delta.token_ids) // 4)

    # ------------------------------------------------------------ what came out

    def is_done(self, request_id: str) -> bool:
        deltas = self.deltas.get(request_id)
        return request_id in self.failed or bool(deltas and deltas[-1].finish_reason)

    def text(self, request_id: str) -> list[int]:
        return [t for delta in self.deltas[request_id] for t in unpack_ids(delta.token_ids)]

    def finish(self, request_id: str) -> str | None:
        reason = self.deltas[request_id][-1].finish_reason
        return None if reason is None else reason.value

    def cached(self, request_id: str) -> int | None:
        return self.deltas[request_id][0].cached_tokens

    def gauge(self, name: str) -> float:
        return self.scheduler.gauges()[name]

    def extended(self, since: int = 0) -> int:
        """Tokens extended by the plans from number `since` on."""
        return sum(count_extended([plan]) for plan in self.plans[since:])


def count_extended(plans: Sequence[StepPlan]) -> int:
    return sum(len(extend.token_ids) // 4 for plan in plans for extend in plan.extends)


LONG = [1 + i % 50 for i in range(100)]


def small(**fields: object) -> Driver:
    """A driver of 64 pages of four tokens, chunks of sixteen."""
    values = {"page_size": 4, "num_pages": 64, "max_step_tokens": 16, **fields}
    return Driver(WorkerScript(**values))  # type: ignore[arg-type]


def expect(prompt: list[int], max_tokens: int, **fields: object) -> list[int]:
    """The text of an undisturbed run."""
    return complete(prompt, max_tokens, sampling(**fields), 256)
