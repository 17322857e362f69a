"""Random lives of the scheduler, tree and pool against undisturbed runs of the fake model.

The fake model reads every k/v of a row through its page table, so any page that is lost, freed too
early, shared wrongly or copied wrongly changes a text or trips an assertion; `check()` runs after
every event (see Driver).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from freetoken.scheduler.pace import Fairness
from freetoken.wire.messages import Accepted, Failed, Sampling
from tests.fakes.model import complete
from tests.fakes.worker import WorkerScript
from tests.scheduler.drive import Driver, sampling

VOCAB = 6
APIS = (b"api-1", b"api-2")

scripts = st.builds(
    WorkerScript,
    num_pages=st.one_of(st.integers(3, 14), st.integers(20, 50)),
    page_size=st.sampled_from([1, 3, 4, 16]),
    max_rows=st.integers(1, 5),
    vocab_size=st.just(VOCAB),
    max_step_tokens=st.sampled_from([1, 4, 7, 64]),
    max_pass_tokens=st.sampled_from([8, 64]),
    max_on_demand_tokens=st.sampled_from([None, None, 0, 0, 3, 3]),
    num_layers=st.sampled_from([1, 3, 8, 8]),
    step_ms=st.sampled_from([1.0, 30.0]),
    token_ms=st.sampled_from([0.0, 20.0]),
    layer_ms=st.sampled_from([0.5, 25.0, 400.0]),
)
fairnesses = st.builds(
    Fairness,
    max_stall_ms=st.sampled_from([1.0, 250.0]),
    decode_share=st.sampled_from([0.0, 0.2, 0.9]),
)


class Lives(RuleBasedStateMachine):
    """What each request must say is computed when it is accepted."""

    @initialize(script=scripts, cut=st.sampled_from([0, 0, 1, 2]), fairness=fairnesses)
    def begin(self, script: WorkerScript, cut: int, fairness: Fairness) -> None:
        context = max(2, min(script.num_pages * script.page_size, 100) - cut)
        script = WorkerScript(**{**vars(script), "context_tokens": context})
        self.context = context
        self.driver = Driver(script, fairness=fairness)
        self.number = 0
        self.api_of: dict[str, bytes] = {}
        self.expected: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.abandoned: set[str] = set()

    @rule(
        data=st.data(),
        api=st.sampled_from(APIS),
        salt=st.sampled_from([None, None, None, "tenant"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        stop=st.sampled_from([(), (0,), (0, 1)]),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
    )
    def submit(
        self,
        data: st.DataObject,
        api: bytes,
        salt: str | None,
        priority: int,
        stop: tuple[int, ...],
        temperature: float,
        max_tokens: int | None,
    ) -> None:
        fields = {"stop_ids": stop, "temperature": temperature}
        self._submit(data.draw(self._prompts()), max_tokens, api, salt, priority, **fields)

    def _submit(
        self,
        prompt: list[int],
        max_tokens: int | None,
        api: bytes = APIS[0],
        salt: str | None = None,
        priority: int = 0,
        **fields: object,
    ) -> None:
        self.number += 1
        request_id = f"r{self.number}"
        answer = self.driver.submit(
            request_id, prompt, max_tokens, api=api, salt=salt, priority=priority, **fields
        )
        fits = len(prompt) <= self.context - 1
        assert isinstance(answer, Accepted if fits else Failed)
        if isinstance(answer, Accepted):
            room = self.context - len(prompt)
            assert answer.max_tokens == min(room if max_tokens is None else max_tokens, room)
            chosen: Sampling = sampling(**fields)
            self.api_of[request_id] = api
            self.prompts[request_id] = prompt
            self.expected[request_id] = complete(prompt, answer.max_tokens, chosen, VOCAB)

    def _prompts(self) -> st.SearchStrategy[list[int]]:
        """New ones of two tokens, so that beginnings are shared, and next turns of old ones."""
        top = max(2, min(self.context, 40))
        fresh = st.lists(st.integers(0, 1), min_size=1, max_size=top)
        if not self.prompts:
            return fresh
        turns = st.builds(
            lambda request_id, cut, more: (
                [*self.prompts[request_id], *self.expected[request_id]][:cut] + more
            ),
            st.sampled_from(sorted(self.prompts)),
            st.integers(1, top),
            st.lists(st.integers(0, VOCAB - 1), max_size=6),
        )
        return st.one_of(fresh, turns)

    @precondition(lambda self: self.driver.script.max_on_demand_tokens is not None)
    @rule(data=st.data(), lengths=st.lists(st.integers(1, 30), min_size=2, max_size=4))
    def submit_some(self, data: st.DataObject, lengths: list[int]) -> None:
        """Long ones pass, while short ones decode."""
        for length in lengths:
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
            self._submit(prompt, 20)

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def apply(self) -> None:
        self.driver.apply()

    @rule(steps=st.integers(1, 12))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self._open()))
        self.driver.abort(request_id, self.api_of[request_id])
        assert self.driver.finish(request_id) == "abort"

    @rule(chance=st.integers(0, 3))
    def plan_what_will_fail(self, chance: int) -> None:
        if chance == 0:
            self.driver.plan(fails=True)

    @rule(api=st.sampled_from(APIS), chance=st.integers(0, 5))
    def lose_api(self, api: bytes, chance: int) -> None:
        if chance == 0:
            mine = {r for r in self._open() if self.api_of[r] == api}
            assert set(self.driver.scheduler.abort_all(api, self.driver.now_s)) == mine
            self.abandoned |= mine
            self.driver.scheduler.check()

    @precondition(lambda self: self.driver.in_flight)
    @rule(chance=st.integers(0, 2))
    def lose_result(self, chance: int) -> None:
        """It is missed when the next one comes, or when it is overdue."""
        if chance == 0:
            self.driver.lose_result()

    @rule(chance=st.integers(0, 9))
    def lose_worker(self, chance: int) -> None:
        if chance:
            return
        open_requests = set(self._open())
        failed = self.driver.lose_worker()
        assert {message.request_id for _, message in failed} == open_requests

    @rule()
    def probe(self) -> None:
        if not self.driver.scheduler.num_open:
            self.driver.scheduler.probe(self.driver.now_s)

    def _open(self) -> list[str]:
        done = self.driver.is_done
        return [r for r in self.expected if r not in self.abandoned and not done(r)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run(10_000)
        assert not self._open(), "a request has no terminal message"
        for request_id, expected in self.expected.items():
            text = driver.text(request_id)
            if (
                request_id in driver.failed
                or request_id in self.abandoned
                or driver.finish(request_id) == "abort"
            ):
                assert text == expected[: len(text)]
            else:
                assert text == expected
                stopped = expected[-1] in self.stop_ids(request_id)
                assert driver.finish(request_id) == ("stop" if stopped else "length")
        driver.scheduler.check_idle()

    def stop_ids(self, request_id: str) -> tuple[int, ...]:
        return self.driver.sampling_of[request_id].stop_ids


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("num_layers", [1, 6])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 40), (3, 14), (16, 7)])
def test_five_thousand_random_operations_leave_every_text_as_in_a_cold_run(
    page_size: int, num_pages: int, num_layers: int
) -> None:
    """The same kinds of events in one long life, where caches are warm and pools always full."""
    rng = random.Random(page_size)
    script = WorkerScript(
        page_size=page_size,
        num_pages=num_pages,
        max_rows=6,
        vocab_size=40,
        max_step_tokens=9,
        max_on_demand_tokens=rng.choice([None, 4]) if num_layers == 1 else 4,
        max_pass_tokens=20,
        num_layers=num_layers,
        layer_ms=40.0,
    )
    driver = Driver(script)
    context = page_size * num_pages
    expected: dict[str, list[int]] = {}
    histories: list[list[int]] = []

    def submit(number: int) -> None:
        if histories and rng.random() < 0.6:
            base = rng.choice(histories)
            prompt = base[: rng.randint(1, len(base))] + rng.choices(range(40), k=rng.randint(0, 3))
        else:
            prompt = rng.choices(range(2), k=rng.randint(1, context // 2))
        request_id = f"r{number}"
        answer = driver.submit(request_id, prompt, rng.choice([None, 1, 5, 12]), stop_ids=(0,))
        assert isinstance(answer, Accepted) == (len(prompt) < context)
        if isinstance(answer, Accepted):
            out = complete(prompt, answer.max_tokens, sampling(stop_ids=(0,)), 40)
            expected[request_id] = out
            histories.append([*prompt, *out])
            del histories[:-20]

    def abort(_: int) -> None:
        waiting = [r for r in list(expected)[-12:] if not driver.is_done(r)]
        if waiting:
            driver.abort(rng.choice(waiting))

    def step(_: int) -> None:
        driver.step()

    events: list[Callable[[int], None]] = [submit, abort, step]
    for number in range(5000):
        rng.choices(events, weights=[5, 1, 25])[0](number)
    driver.run()
    for request_id, out in expected.items():
        text = driver.text(request_id)
        assert text == (out[: len(text)] if driver.finish(request_id) == "abort" else out)
    driver.scheduler.check_idle()
    assert driver.gauge("preemptions") > 0
    assert driver.gauge("cached_tokens") > 0
