from freetoken.launcher.given_up import GRACE_S, GivenUp
from freetoken.launcher.health import Health
from freetoken.wire.messages import Phase

READY = Health(is_ready=True, phase=Phase.READY)


def dead(pid: int) -> Health:
    return Health(is_ready=False, phase=Phase.DEAD, given_up_pid=pid)


def test_a_process_is_overdue_when_it_was_given_up_for_the_whole_grace() -> None:
    given_up = GivenUp()
    assert given_up.find_overdue(READY, 0.0) is None
    assert given_up.find_overdue(dead(7), 1.0) is None
    assert given_up.find_overdue(dead(7), 0.9 + GRACE_S) is None
    assert given_up.find_overdue(dead(7), 1.0 + GRACE_S) == 7


def test_another_one_has_a_grace_of_its_own_and_so_has_one_that_came_back() -> None:
    given_up = GivenUp()
    given_up.find_overdue(dead(7), 0.0)
    assert given_up.find_overdue(dead(8), GRACE_S) is None
    assert given_up.find_overdue(READY, 2 * GRACE_S) is None
    assert given_up.find_overdue(None, 3 * GRACE_S) is None
    assert given_up.find_overdue(dead(8), 4 * GRACE_S) is None
    assert given_up.find_overdue(dead(8), 5 * GRACE_S) == 8
