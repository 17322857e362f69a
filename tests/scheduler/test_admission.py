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


def full_queue(empty_s: float = 0.0) -> WaitQueue:
    """A hundred requests of four tokens wait since `empty_s`, and no more may."""
    queue = WaitQueue(100, 400)
    queue.check_room(4, empty_s)
    for place in range(100):
        queue.push(request(place))
    return queue


def retry_after_s(queue: WaitQueue, now_s: float) -> float:
    with pytest.raises(RequestError) as caught:
        queue.check_room(4, now_s)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


@pytest.mark.parametrize(("seconds_each", "expected"), [(0.01, 1), (0.7, 7), (2.0, 20), (9, 60)])
def test_retry_after_is_when_a_tenth_of_the_queue_is_through_at_the_present_rate(
    seconds_each: float, expected: int
) -> None:
    queue = full_queue()
    for i in range(1, 401):
        queue.note_finish(4, i * seconds_each)
    assert retry_after_s(queue, 400 * seconds_each) == pytest.approx(expected, abs=1)


def test_retry_after_does_not_count_the_time_when_nobody_waited() -> None:
    queue = full_queue(empty_s=1000.0)
    queue.note_finish(4, 1.0)
    for i in range(10):
        queue.note_finish(4, 1000.5 + i)
    assert retry_after_s(queue, 1010.0) == 10


def test_retry_after_is_sane_while_nothing_has_ended() -> None:
    queue = full_queue()
    assert [retry_after_s(queue, now_s) for now_s in (0.0, 7.5, 1e6)] == [1, 8, 60]


def test_retry_after_of_a_long_prompt_is_when_its_tokens_have_room() -> None:
    queue = full_queue()
    for i in range(10):
        queue.note_finish(4, float(i))
    queue.max_requests = 1000
    with pytest.raises(RequestError) as caught:
        queue.check_room(160, 10.0)
    assert caught.value.retry_after_s == 40, "160 tokens at 4 tokens a second"
    assert "400 prompt tokens are waiting, 160 more exceed the limit of 400" in str(caught.value)


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


def test_a_long_output_returns_to_more_room_however_short_others_were() -> None:
    likely = LikelyOutput()
    for _ in range(200):
        likely.note(1)
    row = request(0, tokens=16, max_tokens=10_000)
    assert likely.entry_pages(row, 16) == 2
    row.ids += pack_ids([1] * 320)
    row.num_output = 320
    assert likely.entry_pages(row, 16) == 1 + 20 + 320 / 4 / 16
