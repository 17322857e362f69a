from __future__ import annotations

import random

import pytest

from freetoken.errors import RequestError
from freetoken.scheduler.admission import LikelyOutput, WaitQueue
from freetoken.scheduler.request import Request, State
from freetoken.wire.messages import Sampling, pack_ids


def request(place: float, tokens: int = 4, max_tokens: int = 100) -> Request:
    ids = pack_ids([1] * tokens)
    return Request(f"r{place}", b"x", ids, max_tokens, Sampling(), None, (place, 0), 0.0)


def test_the_oldest_is_the_head_whatever_the_order_of_arrival() -> None:
    queue = WaitQueue(1000, 10_000)
    places = random.Random(1).sample(range(100), 100)
    for place in places:
        queue.push(request(place))
    assert [queue.pop().order[0] for _ in places] == list(range(100))
    assert queue.head() is None
    assert queue.num_requests == queue.num_tokens == 0


def test_those_who_gave_up_are_skipped_and_their_entries_stay_bounded() -> None:
    queue = WaitQueue(1000, 10_000)
    first = request(0)
    queue.push(first)
    for place in range(1, 5000):
        gone = request(place)
        queue.push(gone)
        gone.state = State.GONE
        queue.discard(gone)
    assert queue.head() is first
    assert len(queue._heap) < 100
    assert queue.num_requests == 1


def test_one_set_aside_still_counts_and_returns_to_its_place() -> None:
    queue = WaitQueue(1000, 10_000)
    first, second = request(0), request(1)
    queue.push(second)
    queue.push(first)
    assert queue.set_aside() is first
    assert queue.num_requests == 2
    assert queue.head() is second
    queue.bring_back(first)
    assert queue.pop() is first


def test_retry_after_follows_the_rate_at_which_requests_end() -> None:
    def refusal(seconds_each: float) -> RequestError:
        queue = WaitQueue(100, 10_000)
        for place in range(100):
            queue.push(request(place))
        for i in range(20):
            queue.note_finish(i * seconds_each)
        with pytest.raises(RequestError) as caught:
            queue.check_room(1, 20 * seconds_each)
        return caught.value

    assert refusal(0.01).retry_after_s == 1
    assert refusal(2.0).retry_after_s == 20
    assert refusal(60.0).retry_after_s == 60


def test_headroom_follows_what_outputs_have_been() -> None:
    likely = LikelyOutput()
    row = request(0, tokens=16)
    row.pages.append(0)
    before = likely.headroom_pages([row], 16)
    for _ in range(200):
        likely.note(320)
    assert before == 4
    assert likely.headroom_pages([row], 16) == pytest.approx(100 / 16, abs=1), "max_tokens bounds"
    row.max_tokens = 1000
    assert likely.headroom_pages([row], 16) in (19, 20)
    for _ in range(300):
        likely.note(1)
    assert likely.headroom_pages([row], 16) == 1, "never less than a page"
