"""Stop strings against a naive reading of the rule, over any split of the text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.api.stops import StopScanner, StopSet

LETTERS = st.text("ab.", max_size=30)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4)


def cut_naively(text: str, stops: list[str], include_stop: bool) -> tuple[str, bool]:
    """The first end of any stop string; of those that end there the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end if include_stop else end - max(lengths)], True
    return text, False


@given(LETTERS, STOPS, st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
def test_any_split_is_cut_as_the_whole_text_is(
    text: str, stops: list[str], include_stop: bool, data: st.DataObject
) -> None:
    scanner = StopScanner(StopSet(stops), include_stop=include_stop)
    expected, is_stopped = cut_naively(text, stops, include_stop)
    shown, position = "", 0
    while position < len(text):
        size = data.draw(st.integers(1, 6))
        found = scanner.push(text[position : position + size])
        shown += found.text
        position += size
        assert expected.startswith(shown), "something was shown that is no part of the answer"
        if found.is_stopped:
            break
        # Held back is only what could still become a stop string.
        held = text[len(shown) : position]
        assert any(stop.startswith(held) and stop != held for stop in stops)
    else:
        shown += scanner.finish()
        assert not is_stopped
    assert shown == expected


def test_an_almost_stop_is_shown_once_it_cannot_be_one() -> None:
    scanner = StopScanner(StopSet(["STOP"]))
    assert scanner.push("a STO").text == "a "
    assert scanner.push("RE").text == "STORE"
    assert scanner.finish() == ""


def test_many_long_stop_strings_cost_no_more_a_character() -> None:
    stops = ["x" * length + "y" for length in range(1, 65)]
    scanner = StopScanner(StopSet(stops))
    found = scanner.push("x" * 20_000 + "y")
    assert found.is_stopped
    assert found.text == "x" * (20_000 - 64)
