"""A model without weights whose text depends on every k/v it reads through its page table.

The k/v of a token is a hash of the token, its position and the k/v before it; the next token is a
hash of all k/v of the row, as found in its pages. So a page that is lost, shared wrongly, stale or
overwritten changes the text. `next_token` is the same function without pages: what the text must
be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from freetoken.wire.messages import (
    Extend,
    Logprobs,
    Sampling,
    StepMode,
    StepPlan,
    StepResult,
    StepStats,
    pack_ids,
    unpack_ids,
)

_MASK = (1 << 61) - 1


def _mix(a: int, b: int) -> int:
    return (a * 6364136223846793005 + b * 1442695040888963407 + 1013904223) & _MASK


def _kv(token: int, position: int, before: int) -> int:
    return _mix(_mix(before, token + 1), position)


def _draw(kvs: Sequence[int], sampling: Sampling, num_output: int, vocab_size: int) -> int:
    state = 0
    for value in kvs:
        state = _mix(state, value)
    if sampling.temperature > 0:
        state = _mix(_mix(state, sampling.seed or 0), num_output)
    return (state >> 13) % vocab_size


def next_token(tokens: Sequence[int], sampling: Sampling, num_output: int, vocab_size: int) -> int:
    """What the model says after `tokens`, the last `num_output` of which are output."""
    kvs: list[int] = []
    for position, token in enumerate(tokens):
        kvs.append(_kv(token, position, kvs[-1] if kvs else 0))
    return _draw(kvs, sampling, num_output, vocab_size)


def complete(
    prompt: Sequence[int], max_tokens: int, sampling: Sampling, vocab_size: int
) -> list[int]:
    """The whole output of an undisturbed run, a stop id included."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        token = next_token(tokens, sampling, len(tokens) - len(prompt), vocab_size)
        tokens.append(token)
        if token in sampling.stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Row:
    sampling: Sampling
    num_output: int
    length: int = 0  # tokens with k/v; -1 before the first extend says where it starts
    last_token: int | None = None
    is_broken: bool = False  # was in a step that failed; until forgotten it computes nothing
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _OpenPass:
    extends: tuple[Extend, ...]
    at: int

    def row_ids(self) -> set[int]:
        return {extend.row_id for extend in self.extends}


@dataclass(slots=True)
class FakeModel:
    """Runs step plans over `num_pages` pages. Asserts that each plan makes sense.

    With `reply`, row outputs are these tokens and then a stop id, whatever the k/v. A pass stores
    its k/v with its last part.
    """

    num_pages: int
    page_size: int
    max_rows: int
    vocab_size: int
    reply: tuple[int, ...] | None = None
    expert_bytes_per_token: int = 0
    expert_bytes_per_part: int = 0  # of a pass
    num_layers: int = 1
    opened: _OpenPass | None = None
    rows: dict[int, _Row] = field(default_factory=dict)
    pages: list[list[int | None]] = field(default_factory=list)
    num_extended: int = 0

    def __post_init__(self) -> None:
        self.pages = [[None] * self.page_size for _ in range(self.num_pages)]

    def run(self, plan: StepPlan) -> StepResult:
        """One step, in the order StepPlan names."""
        self._prepare(plan)
        if plan.mode is StepMode.PASS:
            sampled = self._pass(plan)
        else:
            assert plan.layers == (0, 0), "an on-demand step runs all layers"
            sampled = self._on_demand(plan)
        assert len(set(sampled)) == len(sampled), "a row samples twice"
        tokens = [self._sample(self.rows[row_id]) for row_id in sampled]
        return self._result(plan, sampled, tokens)

    def fail(self, plan: StepPlan) -> None:
        """The same, but the forward fails: no k/v is stored, and its rows are lost."""
        self._prepare(plan)
        self._break([*(e.row_id for e in plan.extends), *unpack_ids(plan.decode_rows)])

    def _break(self, row_ids: Sequence[int]) -> None:
        """These rows are void from now on, and so is a pass that has one of them."""
        broken = set(row_ids)
        if self.opened is not None and not broken.isdisjoint(self.opened.row_ids()):
            broken |= self.opened.row_ids()
            self.opened = None
        for row_id in broken & self.rows.keys():
            self.rows[row_id].is_broken = True

    def _on_demand(self, plan: StepPlan) -> list[int]:
        sampled = [e.row_id for e in plan.extends if self._extend(e)]
        positions = unpack_ids(plan.decode_positions)
        decodes = unpack_ids(plan.decode_rows)
        if self.opened is not None:
            others = {*(e.row_id for e in plan.extends), *decodes}
            assert others.isdisjoint(self.opened.row_ids()), "a row of the open pass makes a step"
        for row_id, position in zip(decodes, positions, strict=True):
            self._decode(self.rows[row_id], position)
        return [*sampled, *decodes]

    def _pass(self, plan: StepPlan) -> list[int]:
        """A part; the rows that it samples, if it is the last."""
        assert not plan.decode_rows, "a pass takes no decode rows"
        lo, hi = plan.layers if plan.layers != (0, 0) else (0, self.num_layers)
        assert 0 <= lo < hi <= self.num_layers, f"layers [{lo}, {hi}) of {self.num_layers}"
        is_last = hi == self.num_layers
        sampled = [e.row_id for e in plan.extends if e.is_last] if is_last else []
        if lo and all(self.rows[e.row_id].is_broken for e in plan.extends):
            return sampled
        if lo == 0:
            assert self.opened is None, "a second pass begins"
            assert all(extend.token_ids for extend in plan.extends), "an empty extend"
            self.opened = _OpenPass(plan.extends, 0)
        opened = self.opened
        assert opened is not None, "a pass goes on that is not open"
        assert opened.at == lo, f"a pass waits before layer {opened.at}, the plan says {lo}"
        if lo:
            again = [(e.row_id, e.cached_len, e.is_last, b"") for e in opened.extends]
            named = [(e.row_id, e.cached_len, e.is_last, e.token_ids) for e in plan.extends]
            assert again == named, "a pass goes on with other rows than it began with"
        opened.at = hi
        if is_last:
            self.opened = None
            for extend in opened.extends:
                self._extend(extend)
        return sampled

    def _prepare(self, plan: StepPlan) -> None:
        for row_id in unpack_ids(plan.forget_rows):
            if self.opened is not None and row_id in self.opened.row_ids():
                self._break([row_id])
            self.rows.pop(row_id, None)
        for source, destination in plan.page_copies:
            self.pages[destination] = list(self.pages[source])
        for start in plan.starts:
            assert 0 <= start.row_id < self.max_rows
            assert start.row_id not in self.rows, "a row starts twice"
            assert start.sampling.seed is not None
            self.rows[start.row_id] = _Row(start.sampling, start.num_output, length=-1)
        for run in plan.page_runs:
            row = self.rows[run.row_id]
            assert run.first == len(row.pages), "the page table has a hole"
            row.pages.extend(unpack_ids(run.page_ids))

    def _decode(self, row: _Row, position: int) -> None:
        if row.is_broken:
            return
        assert row.length == position, "a decode at a wrong position"
        assert row.last_token is not None
        self._store(row, row.last_token)

    def _extend(self, extend: Extend) -> bool:
        row = self.rows[extend.row_id]
        tokens = unpack_ids(extend.token_ids)
        assert tokens, "an empty extend"
        if row.is_broken:
            return extend.is_last
        if row.length < 0:
            row.length = extend.cached_len
        assert row.length == extend.cached_len, "an extend at a wrong position"
        for token in tokens:
            self._store(row, token)
        self.num_extended += len(tokens)
        return extend.is_last

    def _at(self, row: _Row, position: int) -> tuple[list[int | None], int]:
        return self.pages[row.pages[position // self.page_size]], position % self.page_size

    def _read(self, row: _Row, position: int) -> int:
        page, offset = self._at(row, position)
        value = page[offset]
        assert value is not None, "k/v is read that was never written"
        return value

    def _store(self, row: _Row, token: int) -> None:
        assert 0 <= token < self.vocab_size
        before = self._read(row, row.length - 1) if row.length else 0
        page, offset = self._at(row, row.length)
        page[offset] = _kv(token, row.length, before)
        row.length += 1

    def _sample(self, row: _Row) -> int:
        if row.is_broken:
            row.last_token = 0
        elif self.reply is not None:
            stop = row.sampling.stop_ids[0] if row.sampling.stop_ids else self.reply[-1]
            at = row.num_output
            row.last_token = self.reply[at] if at < len(self.reply) else stop
        else:
            kvs = [self._read(row, position) for position in range(row.length)]
            row.last_token = _draw(kvs, row.sampling, row.num_output, self.vocab_size)
        row.num_output += 1
        return row.last_token

    def _result(self, plan: StepPlan, rows: list[int], tokens: list[int]) -> StepResult:
        wanted = [self.rows[row_id].sampling.logprobs for row_id in rows]
        logprobs: tuple[Logprobs | None, ...] = ()
        if any(count is not None for count in wanted):
            logprobs = tuple(
                None if count is None else self._logprobs(token, count)
                for token, count in zip(tokens, wanted, strict=True)
            )
        num_tokens = sum(len(e.token_ids) // 4 for e in plan.extends) + len(plan.decode_rows) // 4
        expert_bytes = num_tokens * self.expert_bytes_per_token
        if plan.mode is StepMode.PASS:
            expert_bytes += self.expert_bytes_per_part
        stats = StepStats(step_us=1000, expert_bytes=expert_bytes)
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            mode=plan.mode,
            row_ids=pack_ids(rows),
            token_ids=pack_ids(tokens),
            logprobs=logprobs,
            stats=stats,
            max_on_demand_tokens=None,
        )

    def _logprobs(self, token: int, count: int) -> Logprobs:
        ids = [(token + i) % self.vocab_size for i in range(count)]
        return Logprobs(-0.5, pack_ids(ids), tuple(-0.5 - i for i in range(count)))
