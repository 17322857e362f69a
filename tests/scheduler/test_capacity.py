"""Submit and planning agree on what fits: at every size of a page, at every edge of the context.

A request that was accepted is admitted as soon as it is alone, whatever the cache holds; one that
was not is told at once. After each case a small request works and nothing is left behind.
"""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.wire.messages import Accepted, Failed
from tests.fakes.worker import WorkerScript
from tests.scheduler.drive import Driver, expect, small


def control(driver: Driver) -> None:
    """A small request works, and all pages and rows are back."""
    name = f"control-{len(driver.plans)}"
    driver.submit(name, [200, 201], 2)
    driver.run()
    room = driver.accepted[name].max_tokens
    assert driver.text(name) == expect([200, 201], room)
    driver.scheduler.check_idle()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_submit_accepts_planning_admits_at_once_when_it_is_alone(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 40))
    pool = page_size * data.draw(st.integers(-(-4 // page_size), max(1, 80 // page_size)))
    context = data.draw(st.integers(4, pool)) if pool > 4 else pool
    driver = small(
        page_size=page_size,
        num_pages=pool // page_size,
        context_tokens=context,
        max_rows=data.draw(st.integers(1, 3)),
        max_step_tokens=data.draw(st.sampled_from([1, 7, 64])),
        max_on_demand_tokens=data.draw(st.sampled_from([None, 0, 5])),
    )
    texts = [[1] * context]
    for number in range(data.draw(st.integers(1, 6))):
        base = data.draw(st.sampled_from(texts))
        cut = data.draw(st.integers(1, len(base)))
        prompt = base[:cut] + data.draw(st.lists(st.integers(1, 3), max_size=context + 2 - cut))
        request_id = f"r{number}"
        answer = driver.submit(request_id, prompt, data.draw(st.sampled_from([None, 1, 9])))
        assert isinstance(answer, Accepted) == (len(prompt) <= context - 1)
        if isinstance(answer, Failed):
            assert answer.code == "context_length_exceeded"
            continue
        plan = driver.plan()
        assert plan is not None
        assert len(plan.starts) == 1, "it is alone and waits"
        driver.run()
        assert driver.finish(request_id) == "length"
        texts.append([*prompt, *driver.text(request_id)])
    driver.scheduler.check_idle()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "scarce",
    [
        {"max_rows": 4},
        {"max_rows": 1},
        {"max_rows": 4, "num_pages": 1024, "context_tokens": 128},
        {"max_rows": 1, "max_on_demand_tokens": 3},
    ],
    ids=["pages", "pages and rows", "context", "passes"],
)
@pytest.mark.parametrize("beside", [0, 2])
def test_at_the_edge_of_the_context_it_is_accepted_clamped_or_refused(
    page_size: int, scarce: dict[str, int], beside: int
) -> None:
    n = 128
    for length in (n - 2, n - 1, n, n + 1):
        for max_tokens in (None, 1, 2, 3):
            driver = small(page_size=page_size, **{"num_pages": n // page_size, **scarce})
            for i in range(beside):
                driver.submit(f"other{i}", [i], 8)
            driver.step()
            answer = driver.submit("edge", [3] * length, max_tokens)
            if length < n:
                room = min(n - length, max_tokens or n)
                assert answer == Accepted("edge", length, room)
                driver.run(max_steps=400)
                assert driver.text("edge") == expect([3] * length, room)
                assert driver.finish("edge") == "length"
            else:
                assert isinstance(answer, Failed)
                assert f"prompt needs {length} tokens" in answer.message
                assert f"the pool holds {n}" in answer.message
                driver.run(max_steps=100)
            assert all(driver.finish(f"other{i}") == "length" for i in range(beside))
            control(driver)


@pytest.fixture(scope="module")
def reported() -> Driver:
    """8,209 usable tokens at page size 1; chunks of 2,048."""
    driver = Driver(WorkerScript(page_size=1, num_pages=8209, max_step_tokens=2048))
    driver.scheduler.check = lambda: None  # type: ignore[method-assign]  # 8,209 pages each time
    return driver


@pytest.mark.parametrize("length", [8011, 8208])
def test_a_prompt_that_the_pool_holds_is_served(reported: Driver, length: int) -> None:
    prompt = [1 + i % 200 for i in range(length)]
    answer = reported.submit(f"r{length}", prompt, 3)
    room = min(3, 8209 - length)
    assert answer == Accepted(f"r{length}", length, room)
    reported.run(max_steps=20)
    assert reported.text(f"r{length}") == expect(prompt, room)
    control(reported)


@pytest.mark.parametrize("length", [8209, 8760])
def test_a_prompt_that_the_pool_never_holds_is_refused_at_once(
    reported: Driver, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    reported.submit("running", [7, 8], 20)
    reported.step()
    with caplog.at_level(logging.WARNING, "freetoken"):
        answer = reported.submit(f"r{length}", [1] * length, 3)
    assert isinstance(answer, Failed)
    assert answer.code == "context_length_exceeded"
    last = " and at least one token of output" if length == 8209 else ""
    assert answer.message == (
        f"prompt needs {length} tokens ({length} pages of 1){last}, the pool holds 8209 (8209); "
        "raise --context-tokens or shorten the prompt"
    )
    assert f"request.refused id=r{length} tokens={length} context=8209" in caplog.text
    assert reported.scheduler.num_waiting == 0
    reported.run()
    assert reported.text("running") == expect([7, 8], 20)
    control(reported)


def test_the_refusal_names_the_flag_that_sized_the_pool() -> None:
    for flag in ("--num-pages", "--num-tokens", "--context-tokens"):
        driver = small(context_flag=flag)
        answer = driver.submit("a", [1] * 300)
        assert isinstance(answer, Failed)
        assert answer.message.endswith(f"; raise {flag} or shorten the prompt")
        control(driver)


def test_an_open_ended_request_leaves_room_for_others_and_ends_at_the_wall() -> None:
    """max_tokens omitted is the remaining context, but no claim to it."""
    driver = small(page_size=4, num_pages=64, max_rows=8)
    answer = driver.submit("open", [9, 9, 9], None)
    assert answer == Accepted("open", 3, 253)
    driver.step()
    for i in range(6):
        driver.submit(f"r{i}", [i, i], 8)
    while not all(driver.is_done(f"r{i}") for i in range(6)):
        assert driver.step()
    assert not driver.is_done("open"), "the others ran beside it"
    driver.run()
    assert driver.text("open") == expect([9, 9, 9], 253)
    assert driver.finish("open") == "length"
    assert driver.gauge("preemptions") == 0
    control(driver)
