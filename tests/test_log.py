"""Log lines: one event, one line."""

from __future__ import annotations

import logging

import pytest

from freetoken import log


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("two words", "'two words'"),
        ("", "''"),
        ("a\nforged", "'a\\nforged'"),
        ("\x1b[2J", "'\\x1b[2J'"),
        ("Grüße", "Grüße"),
        (3, "3"),
        (1234.5678, "1235"),
        (None, "None"),
    ],
)
def test_a_value_is_shown_within_one_line(value: object, shown: str) -> None:
    assert log.event("it.happened", key=value) == f"it.happened key={shown}"


def test_fields_keep_their_order() -> None:
    assert log.event("end", id="r1", b=2, a=1) == "end id=r1 b=2 a=1"


def test_records_carry_the_process_s_name_once_however_often_it_is_set_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup("freetoken-test", "INFO")
    log.setup("freetoken-test", "INFO")
    logger = log.get("freetoken.somewhere")
    logger.debug("too quiet")
    logger.info("heard")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["I freetoken-test heard"]
    assert len(logging.getLogger("freetoken").handlers) == 1


def test_a_journal_writes_what_was_noted_once_in_order_and_only_if_it_is_heard(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup("freetoken-test", "INFO")
    logger = log.get("freetoken.somewhere")
    journal = log.Journal(logger)
    journal.info("one", id="a")
    journal.info("two", id="b")
    logger.info("between")
    journal.write()
    journal.write()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 3)[3] for line in lines] == ["between", "one id=a", "two id=b"]
    log.setup("freetoken-test", "WARNING")
    journal.info("three")
    log.setup("freetoken-test", "INFO")
    journal.write()
    assert not capsys.readouterr().err
