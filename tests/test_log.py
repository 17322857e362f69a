"""The form of log lines."""

from __future__ import annotations

import pytest

from freetoken import log


@pytest.mark.parametrize("value", ["a\nb=c", "a b", "", "\x1b[2J", "a\u2028b"])
def test_a_value_cannot_end_its_line_or_pose_as_a_field(value: str) -> None:
    line = log.event("http.error", path=value)
    assert line == f"http.error path={value!r}"
    assert len(line.splitlines()) == 1


def test_plain_values_are_not_quoted() -> None:
    assert log.event("end", id="r-1", ms=1.23456, n=3) == "end id=r-1 ms=1.235 n=3"
