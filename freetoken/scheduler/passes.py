"""The pass that is open: its rows, and the layers that are planned. Plain state.

The roster keeps it; steps are drafted from it. Its rows make no other steps while it is open, keep
their seats even if their clients leave, and are not preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.scheduler.pace import Account
from freetoken.scheduler.request import Request, State
from freetoken.wire.messages import Extend


@dataclass(slots=True)
class OpenPass:
    """`rows`: request, kv_len after the pass, whether it samples · `extends`: the same for the
    worker, without tokens · `at`: the layer where the next part begins · `is_stopped`: no further
    part will come; it is over with the one planned last."""

    rows: list[tuple[Request, int, bool]]
    extends: list[Extend]
    num_layers: int
    account: Account
    at: int = 0
    last_step: int = -1
    is_stopped: bool = False

    @property
    def is_abandoned(self) -> bool:
        """Nobody waits for what it computes."""
        return all(request.state is State.LEAVING for request, _, _ in self.rows)

    def check(self) -> None:
        """Assert what holds while it is open."""
        assert 0 < self.at < self.num_layers
        assert not self.is_abandoned, "a pass that nobody waits for is not stopped"
        for request, kv_len, _ in self.rows:
            assert request.in_pass
            assert request.planned_len == kv_len > request.kv_len
            assert request.last_step == self.last_step
            assert request.state in (State.EXTENDING, State.LEAVING), "a row of the pass decodes"
