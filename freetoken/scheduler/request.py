"""One request: its tokens, and while it runs its row, its pages and what is in flight.

Plain state, changed by the scheduler and the ledger; no decisions here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, auto

from freetoken.scheduler.node import TOKEN_BYTES, Node
from freetoken.wire.messages import RowStart, Sampling


@dataclass(frozen=True, slots=True)
class PageCopy:
    """`source` is copied to `destination` before the step; `lock` keeps it until the result."""

    source: int
    destination: int
    lock: Node


class State(Enum):
    WAITING = auto()  # in the queue
    FOLLOWING = auto()  # waits for the prefix that another request is computing
    EXTENDING = auto()  # has a row; part of its tokens are not planned yet, or not computed
    DECODING = auto()
    LEAVING = auto()  # planned no more; its row and pages go when its last step is back
    GONE = auto()


class Request:
    """Tokens are bytes, as on the wire. `order` is the place in the queue and decides who is the
    youngest; smaller is older. `api` is None for the engine's own probe, which stays invisible
    and enters no cache.

    While it runs, `pages[:tree_pages]` belong to the tree, locked through `node`, and the rest to
    the row. k/v of `[0, kv_len)` are computed, of `[0, planned_len)` at least planned; a decode
    may be planned while `planned_len < decode_limit`.
    """

    __slots__ = (
        "api",
        "arrived_s",
        "cached_len",
        "cached_tokens",
        "copy",
        "decode_limit",
        "distinct_experts",
        "expert_bytes",
        "extend_planned_s",
        "first_token_s",
        "followers",
        "id",
        "ids",
        "in_pass",
        "is_private",
        "is_void",
        "keeps",
        "kv_len",
        "last_step",
        "max_tokens",
        "node",
        "num_output",
        "order",
        "output_at_preemption",
        "pages",
        "path",
        "planned_len",
        "prompt_tokens",
        "requeues",
        "row_id",
        "salt",
        "sampling",
        "settle_at",
        "slot_hits",
        "slot_misses",
        "state",
        "stop_ids",
        "tree_pages",
    )

    def __init__(
        self,
        request_id: str,
        api: bytes | None,
        prompt_ids: bytes,
        max_tokens: int,
        sampling: Sampling,
        salt: str | None,
        order: tuple[float, int],
        arrived_s: float,
    ) -> None:
        self.id = request_id
        self.api = api
        self.ids = bytearray(prompt_ids)
        self.prompt_tokens = len(prompt_ids) // TOKEN_BYTES
        self.num_output = 0
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.stop_ids = frozenset(sampling.stop_ids)
        self.salt = salt
        self.order = order
        self.arrived_s = arrived_s
        self.state = State.WAITING
        self.first_token_s: float | None = None
        self.cached_tokens: int | None = None  # found in the cache when it first ran
        self.followers: list[tuple[int, tuple[float, int], Request]] = []  # see roster.py
        self.output_at_preemption: int | None = None  # the last time
        self.requeues = False  # when LEAVING: back to the queue, not gone
        self.keeps = True  # when LEAVING: its computed pages are good
        self.is_void = False  # LEAVING: what steps still bring for it is dropped
        self.row_id = -1
        self.pages = array("i")
        self.leave_row()

    def leave_row(self) -> None:
        """Forget the row; the ledger has taken pages and lock back."""
        self.row_id = -1
        self.pages = array("i")
        self.node: Node | None = None
        self.copy: PageCopy | None = None  # until its first chunk is planned
        self.tree_pages = 0
        self.is_private = self.api is None
        self.cached_len = 0
        self.kv_len = 0
        self.planned_len = 0
        self.decode_limit = 0
        self.settle_at = 0  # kv_len at which the next page is whole
        self.last_step = -1
        self.in_pass = False  # a pass that is open; what it plans is back only when it ends
        self.extend_planned_s: float | None = None
        # What the steps of its extend have cost, other rows of theirs included.
        self.expert_bytes = 0
        self.slot_hits = 0
        self.slot_misses = 0
        self.distinct_experts = 0
        self.path = ""

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.num_output

    @property
    def decode_end(self) -> int:
        """Positions below this one may be decoded; the last output token is never an input."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def is_running(self) -> bool:
        return self.state is State.EXTENDING or self.state is State.DECODING

    @property
    def is_spared(self) -> bool:
        """It was preempted and has made no token since: it will not be again before it has."""
        return self.output_at_preemption == self.num_output

    def start(self) -> RowStart:
        """What the worker must know to begin, or to resume."""
        sampling, cut = self.sampling, self.prompt_tokens * TOKEN_BYTES
        repeats = sampling.repetition_penalty != 1.0
        counts = repeats or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        return RowStart(
            row_id=self.row_id,
            sampling=sampling,
            num_output=self.num_output,
            prompt_ids=bytes(self.ids[:cut]) if repeats else b"",
            output_ids=bytes(self.ids[cut:]) if counts else b"",
        )
