from __future__ import annotations

from dataclasses import replace

from freetoken.scheduler.health import PROBE_AFTER_S, Health, Signs, Status
from freetoken.wire.messages import Phase

IDLE = Signs(has_worker=True, num_open=0, oldest_step_s=None, last_token_s=None)


def loaded() -> Health:
    health = Health(stall_timeout_s=5.0)
    health.connected()
    return health


def test_loading_shows_what_the_worker_says() -> None:
    health = Health(5.0)
    none = replace(IDLE, has_worker=False)
    assert health.status(none, 0.0).phase is Phase.STARTING
    health.connected()
    health.note_progress(Status(Phase.LOADING, "shard 2 of 5", 20, 100))
    assert health.status(none, 0.0) == Status(Phase.LOADING, "shard 2 of 5", 20, 100)
    health.note_progress(Status(Phase.READY, "", 100, 100))
    assert health.status(none, 0.0).phase is Phase.CHECKING, "a heartbeat alone is not ready"
    assert not health.must_probe(none, 0.0)


def test_ready_only_after_a_token_came_through() -> None:
    health = loaded()
    assert health.status(IDLE, 0.0).phase is Phase.CHECKING
    assert health.must_probe(IDLE, 0.0)
    assert not health.must_probe(replace(IDLE, num_open=1), 0.5)
    assert health.status(replace(IDLE, last_token_s=0.6), 0.6).phase is Phase.READY


def test_an_idle_engine_is_probed_again() -> None:
    health = loaded()
    assert health.must_probe(IDLE, 100.0)
    signs = replace(IDLE, last_token_s=101.0)
    assert not health.must_probe(signs, 101.0 + PROBE_AFTER_S - 1)
    assert not health.must_probe(replace(signs, num_open=3), 101.0 + PROBE_AFTER_S)
    assert health.must_probe(signs, 101.0 + PROBE_AFTER_S)


def test_a_step_that_is_out_too_long_is_a_stall_and_its_result_ends_it() -> None:
    health = loaded()
    signs = replace(IDLE, num_open=1, oldest_step_s=10.0, last_token_s=9.0)
    assert health.status(signs, 15.0).phase is Phase.READY
    assert health.status(signs, 15.1).phase is Phase.STALLED
    assert health.status(replace(signs, oldest_step_s=15.2), 15.2).phase is Phase.READY


def test_a_step_that_is_out_for_three_limits_will_not_end() -> None:
    health = loaded()
    assert not health.is_hung(10.0, 25.0)
    assert health.is_hung(10.0, 25.1)


def test_a_failed_probe_is_not_ready_and_is_tried_again() -> None:
    health = loaded()
    assert health.must_probe(IDLE, 0.0)
    health.note_step("no memory", was_probe=True)
    status = health.status(IDLE, 0.1)
    assert status.phase is Phase.CHECKING
    assert "no memory" in status.detail
    assert not health.must_probe(IDLE, 0.5)
    assert health.must_probe(IDLE, 1.5)
    health.note_step(None, was_probe=False)
    signs = replace(IDLE, last_token_s=1.6)
    assert health.status(signs, 1.6).phase is Phase.READY
    health.note_step("no memory", was_probe=True)
    assert health.status(signs, 1.7).phase is Phase.STALLED


def test_a_step_that_fails_with_a_request_only_asks_for_a_probe() -> None:
    health = loaded()
    signs = replace(IDLE, last_token_s=5.0)
    health.note_step("bad input", was_probe=False)
    assert health.status(signs, 5.1).phase is Phase.READY
    assert health.must_probe(signs, 5.1)


def test_a_lost_worker_is_dead_until_another_says_hello() -> None:
    health = loaded()
    health.lost("process 7 has exited")
    none = replace(IDLE, has_worker=False)
    assert health.status(none, 0.0) == Status(Phase.DEAD, "process 7 has exited")
    health.connected()
    assert health.status(none, 0.0).phase is Phase.STARTING
