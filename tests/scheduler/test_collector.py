"""Python's collector runs where it delays nobody."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from freetoken.scheduler.collector import BUSY_S, IDLE_S, Collector
from tests.processes import run_python


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


class Count:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> int:
        self.runs += 1
        return 0


def test_it_runs_at_most_every_ten_seconds_and_while_no_step_is_out() -> None:
    count = Count()
    collector = Collector(count)
    collector.start(100.0)
    assert not gc.isenabled()
    runs = []
    for now_s, is_idle in (
        (100.0 + IDLE_S / 2, True),
        (100.0 + IDLE_S, False),
        (100.0 + IDLE_S, True),
        (100.0 + IDLE_S * 1.5, True),
        (100.0 + IDLE_S + BUSY_S, False),
    ):
        collector.tick(now_s, is_idle)
        runs.append(count.runs)
    assert runs == [1, 1, 2, 2, 3]


def test_it_leaves_a_process_alone_that_did_not_ask_for_it() -> None:
    count = Count()
    Collector(count).tick(1e9, is_idle=True)
    assert count.runs == 0
    assert gc.isenabled()


CYCLES = """
import gc
from tests.scheduler.drive import LONG, small

driver = small(num_pages=40, max_rows=4)
gc.collect()
gc.disable()
for i in range(30):
    driver.submit(f"r{i}", [*LONG[: 3 * i + 1], i], 5)
driver.abort("r20")
driver.run()
assert driver.gauge("pages_free") < 40
print(gc.collect())
"""


def test_requests_and_the_tree_leave_no_cycles_behind() -> None:
    """In a process of its own, without what other tests and their threads leave."""
    done = run_python(CYCLES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"
