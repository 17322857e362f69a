"""The scheduler with the fake model: what comes out of whole requests."""

from __future__ import annotations

from freetoken.scheduler.scheduler import Scheduler
from tests.fakes.model import complete
from tests.fakes.worker import WorkerScript
from tests.scheduler.drive import Driver, sampling


def test_a_request_gets_the_text_of_an_undisturbed_run() -> None:
    driver = Driver(WorkerScript(page_size=4, num_pages=16, max_step_tokens=5))
    driver.submit("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=9)
    driver.run()
    assert driver.text("a") == complete([1, 2, 3, 4, 5, 6, 7], 9, sampling(), 256)
    assert driver.finish("a") == "length"
    assert isinstance(driver.scheduler, Scheduler)
