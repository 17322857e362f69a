"""Whose turn it is while a long prompt is computed, and how much of it comes at a time.

Numbers only, in ms. A pass is cut into parts between which on-demand steps run, for the rows that
decode and for short newcomers. Called by the steps' drafts; the scheduler reports what each step
has taken.

What holds, with `max_stall_ms` M, `decode_share` s, a decode step of d and parts of whole layers:

* While others decode, a part is as long as keeps them at their share, and with the decode step
  behind it at most M: that is the longest gap that a pass makes in a stream. (Not so if a layer
  takes longer; and where a decode step alone takes most of M, a part may take M / 4.) A step that
  newcomers extend in takes what it takes: so no gap is longer than M, or a layer, and one step.
* Behind a part there is always a turn for others. A short newcomer (see chunks.py) is in it, or
  where that would make the gap too long in the next one: it waits for at most the two parts in
  flight when it comes.
* A pass that takes P alone is done after at most (2 + s / (1 - s)) P, two decode steps for each of
  its parts, and one step more: newcomers are let in only while what they have added is no more than
  what the pass has had.
* Where there are no passes, a long prompt goes in chunks that the streams ride with: a chunk is as
  large as fits into M, with MIN_CHUNK tokens at the least.
* Without anybody else, parts are long: M / 2, so that a newcomer finds a pause within M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from freetoken.wire.messages import StepMode

MARGIN = 0.9
"""Of the stall limit is planned for: layers and steps vary."""

MAX_GROWTH = 2
"""A part has at most so many times the layers of the longest one measured: the first layers of a
model may be cheaper than the others."""

WEIGHT = 0.25
"""Of a new measurement in a running mean."""

MIN_CHUNK = 64
"""Tokens; fewer share too little of what a step costs anyway. The demo model on two busy cores, a
prompt of 1,300 tokens beside a stream: its longest gap 0.5 s instead of 1 to 4 s with chunks of
512, the prompt as fast (2026-12-01)."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """The options. max_stall_ms: > 0 · decode_share: [0, 1)."""

    max_stall_ms: float = 250.0
    decode_share: float = 0.2


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who else could use the worker: rows that decode, short extends."""

    decodes: bool
    newcomers: bool

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.newcomers


@dataclass(slots=True)
class Times:
    """What steps take, as measured of late; before that a guess. A layer: of a pass. Extends are
    of all sizes: theirs is near the longest."""

    decode_ms: float = 10.0
    extend_ms: float = 50.0
    layer_ms: float = 10.0
    token_ms: float | None = None  # of a chunk
    has_decode: bool = False

    def note_step(self, ms: float, num_extended: int, has_decodes: bool) -> None:
        """An on-demand step is done."""
        if num_extended:
            self.extend_ms = max(ms, self.extend_ms + WEIGHT * (ms - self.extend_ms))
            self._note_chunk(ms - self.decode_ms if has_decodes else ms, num_extended)
        elif self.has_decode:
            self.decode_ms += WEIGHT * (ms - self.decode_ms)
        else:
            self.decode_ms, self.has_decode = ms, True

    def _note_chunk(self, ms: float, num_tokens: int) -> None:
        if num_tokens < MIN_CHUNK:
            return
        token_ms = max(ms, 0.0) / num_tokens
        if self.token_ms is None:
            self.token_ms = token_ms
        else:
            self.token_ms += WEIGHT * (token_ms - self.token_ms)


def longest_ms(fairness: Fairness, times: Times) -> float:
    """What may come between two decode steps, so that a stream's gap keeps to the limit."""
    stall_ms = fairness.max_stall_ms
    return max(MARGIN * stall_ms - times.decode_ms, stall_ms / 4)


@dataclass(slots=True)
class Charge:
    """What a planned step is thought to take, until it is known. `layers` 0: an on-demand step.

    `account` None: no pass was open. `decode_ms`: the part of an on-demand step that its decode
    rows would take anyway; the extends have added the rest.
    """

    account: Account | None
    ms: float
    layers: int = 0
    has_decodes: bool = False
    num_extended: int = 0  # tokens
    decode_ms: float = 0.0


@dataclass(slots=True)
class Account:
    """Of one pass: what it and the others have had since it began, steps in flight as expected.

    `contested_ms` is the part of `pass_ms` in which others decoded.
    """

    fairness: Fairness
    times: Times
    pass_ms: float = 0.0
    contested_ms: float = 0.0
    decode_ms: float = 0.0
    newcomer_ms: float = 0.0
    part_ms: float = 0.0  # the part planned last, as expected
    steps_since: int = 0  # on-demand steps planned behind it
    has_let_in: bool = True  # newcomers, in one of them
    measured_layers: int = 0
    measured_ms: float = 0.0
    last_layer_ms: float = 0.0
    longest_part: int = 0  # measured, in layers

    # ------------------------------------------------------------ turns

    def prefers_part(self, crowd: Crowd) -> bool:
        """Whether the next step is a part; if not, it is an on-demand step, should there be any."""
        if crowd.is_empty:
            return True
        if not self.steps_since:
            return False
        if crowd.newcomers and not self.has_let_in and self._owes_newcomers:
            return False
        if not crowd.decodes:
            return True
        share = self.fairness.decode_share
        return self.decode_ms >= share * (self.decode_ms + self.contested_ms)

    def lets_newcomers_in(self, crowd: Crowd) -> bool:
        """Whether the on-demand step that is next may extend. Where that would make too long a gap,
        the streams get a token before."""
        if crowd.decodes and not self.steps_since:
            gap_ms = self.part_ms + self.times.extend_ms
            if gap_ms > MARGIN * self.fairness.max_stall_ms:
                return False
        return self._owes_newcomers

    @property
    def _owes_newcomers(self) -> bool:
        return self.newcomer_ms <= self.pass_ms

    def part_layers(self, left: int, crowd: Crowd) -> int:
        """How many of the `left` layers the next part has, at least 1; parts alike in length."""
        if not self.longest_part:
            return 1
        fitting = int(self._part_ms(crowd) / self.layer_ms)
        layers = min(max(fitting, 1), MAX_GROWTH * self.longest_part, left)
        return math.ceil(left / math.ceil(left / layers))

    @property
    def layer_ms(self) -> float:
        """Cautious: what the last part says, if that is more than the mean."""
        if not self.measured_layers:
            return self.times.layer_ms
        return max(self.measured_ms / self.measured_layers, self.last_layer_ms, 1e-3)

    def _part_ms(self, crowd: Crowd) -> float:
        """How long the next part may take."""
        stall_ms, share = self.fairness.max_stall_ms, self.fairness.decode_share
        if crowd.is_empty:
            return stall_ms / 2
        limit_ms = longest_ms(self.fairness, self.times)
        if not crowd.decodes or not share:
            return limit_ms
        due_ms = self.decode_ms * (1 - share) / share - self.contested_ms
        return min(limit_ms, max(due_ms, stall_ms / 8))

    # ------------------------------------------------------------ what steps take

    def expect(self, charge: Charge) -> None:
        """A step is planned."""
        if charge.layers:
            self.part_ms, self.steps_since, self.has_let_in = charge.ms, 0, False
            self.pass_ms += charge.ms
            self.contested_ms += charge.ms if charge.has_decodes else 0.0
        else:
            self.steps_since += 1
            self.has_let_in = self.has_let_in or charge.num_extended > 0
            self.decode_ms += charge.decode_ms
            self.newcomer_ms += charge.ms - charge.decode_ms

    def settle(self, charge: Charge, ms: float) -> None:
        """It is done."""
        more_ms = ms - charge.ms
        if charge.layers:
            self.pass_ms += more_ms
            self.contested_ms += more_ms if charge.has_decodes else 0.0
            self.note_part(charge.layers, ms)
        elif charge.num_extended:
            self.newcomer_ms = max(0.0, self.newcomer_ms + more_ms)
        else:
            self.decode_ms += more_ms

    def note_part(self, layers: int, ms: float) -> None:
        self.measured_layers += layers
        self.measured_ms += ms
        self.last_layer_ms = ms / layers
        self.longest_part = max(self.longest_part, layers)
        self.times.layer_ms = self.layer_ms


@dataclass(slots=True)
class Pace:
    """Of one life of the worker. `account`, in all methods: of the open pass, if there is one."""

    fairness: Fairness
    times: Times = field(default_factory=Times)
    last_mode: StepMode = StepMode.ON_DEMAND

    def prefers_part(self, account: Account | None, crowd: Crowd) -> bool:
        """Whether a part is next, maybe a pass's first; between two passes others have a turn."""
        if account is not None:
            return account.prefers_part(crowd)
        return crowd.is_empty or self.last_mode is not StepMode.PASS

    def chunk_tokens(self, has_decodes: bool, limit: int) -> int:
        """How many tokens of prompts may ride with the rows that decode, where there are no passes:
        what fits into the longest gap, at most `limit`."""
        token_ms = self.times.token_ms
        if not has_decodes or token_ms == 0.0:
            return limit
        room_ms = longest_ms(self.fairness, self.times)
        fitting = 0 if token_ms is None else int(room_ms / token_ms)
        return min(limit, max(fitting, MIN_CHUNK))

    def new_account(self) -> Account:
        return Account(self.fairness, self.times)

    def charge_part(self, account: Account, layers: int, crowd: Crowd) -> Charge:
        """A part is planned."""
        ms = layers * account.layer_ms
        return self._expect(StepMode.PASS, Charge(account, ms, layers, crowd.decodes))

    def charge_step(
        self, account: Account | None, *, has_decodes: bool, num_extended: int
    ) -> Charge:
        """An on-demand step is planned."""
        decode_ms = self.times.decode_ms if has_decodes else 0.0
        ms = max(self.times.extend_ms, decode_ms) if num_extended else decode_ms
        charge = Charge(account, ms, 0, has_decodes, num_extended, decode_ms)
        return self._expect(StepMode.ON_DEMAND, charge)

    def _expect(self, mode: StepMode, charge: Charge) -> Charge:
        self.last_mode = mode
        if charge.account is not None:
            charge.account.expect(charge)
        return charge

    def settle(self, charge: Charge, ms: float) -> None:
        """The result of a step is here."""
        if not charge.layers:
            self.times.note_step(ms, charge.num_extended, charge.has_decodes)
        if charge.account is not None:
            charge.account.settle(charge, ms)
