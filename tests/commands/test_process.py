"""What is done before a room is imported."""

from __future__ import annotations

from freetoken.commands.process import wait_passively


def test_threads_wait_passively_unless_the_user_says_otherwise() -> None:
    environ: dict[str, str] = {}
    wait_passively(environ)
    assert environ == {"OMP_WAIT_POLICY": "passive"}
    environ = {"OMP_WAIT_POLICY": "active"}
    wait_passively(environ)
    assert environ == {"OMP_WAIT_POLICY": "active"}
