"""The worker's view of the rows: what each holds, and a step plan checked against it.

Nothing of a plan is trusted: a row, page, position or token id that does not fit raises StepError
before the model reads or writes a byte. Rows of a failed step become void: what later plans say
about them is skipped until they are forgotten or started again, since up to two plans that name
them may be queued already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from freetoken.wire.messages import Extend, PageRun, StepPlan
from freetoken.worker.faults import StepError
from freetoken.worker.kv import PageTable
from freetoken.worker.transfer import to_device

Ids = npt.NDArray[np.int64]


class RowState(IntEnum):
    FREE = 0
    ACTIVE = 1
    VOID = 2  # its step failed


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens of a row at positions `[cached_len, cached_len + len(token_ids))`."""

    row_id: int
    cached_len: int
    token_ids: npt.NDArray[np.int32]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What one forward computes: extends, then decode rows with the token sampled last."""

    extends: tuple[Part, ...]
    decode_rows: Ids
    decode_positions: Ids

    @property
    def num_extend_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.extends)

    @property
    def num_tokens(self) -> int:
        return self.num_extend_tokens + len(self.decode_rows)

    def row_ids(self) -> list[int]:
        return [*(part.row_id for part in self.extends), *self.decode_rows.tolist()]

    def sampled_rows(self) -> Ids:
        """[n] rows that get a token, in the order of StepResult."""
        last = [part.row_id for part in self.extends if part.is_last]
        return np.concatenate([np.array(last, np.int64), self.decode_rows])


def unpack(data: bytes, what: str) -> npt.NDArray[np.int32]:
    """Packed ids as an array of its own; StepError if the bytes are no int32s."""
    if len(data) % 4:
        raise StepError(f"{what}: {len(data)} bytes are no int32 ids")
    return np.frombuffer(data, "<i4").astype(np.int32)


class Rows:
    """`last_tokens`: [R + 1] int64 on the device, the token sampled last for each row; the last
    entry belongs to no row and takes what padding samples."""

    def __init__(
        self,
        *,
        max_rows: int,
        num_pages: int,
        page_size: int,
        context_tokens: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.max_rows = max_rows
        self._num_pages = num_pages
        self._page_size = page_size
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self.pages = PageTable(max_rows, -(-context_tokens // page_size), device)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._state = np.zeros(max_rows, np.int8)
        self._is_fresh = np.zeros(max_rows, np.bool_)  # no extend yet: any prefix may be cached
        self._kv_len = np.zeros(max_rows, np.int64)
        self._has_token = np.zeros(max_rows, np.bool_)

    # ---- state

    def forget(self, row_ids: Ids) -> None:
        self._check_row_ids(row_ids, "forget_rows")
        self._state[row_ids] = RowState.FREE
        self._has_token[row_ids] = False
        self.pages.clear(row_ids)

    def void(self, row_ids: Ids) -> None:
        """Rows of a failed step; ids out of range are ignored."""
        known = row_ids[(row_ids >= 0) & (row_ids < self.max_rows)]
        self.forget(known)
        self._state[known] = RowState.VOID

    def is_active(self, row_id: int) -> bool:
        """False for a void row; StepError for a row that was never started."""
        if not 0 <= row_id < self.max_rows:
            raise StepError(f"row {row_id} is named, the rows are [0, {self.max_rows})")
        if self._state[row_id] == RowState.FREE:
            raise StepError(f"row {row_id} is named, but was not started")
        return bool(self._state[row_id] == RowState.ACTIVE)

    def start(self, row_id: int) -> None:
        self._check_row_ids(np.array([row_id]), "starts")
        if self._state[row_id] == RowState.ACTIVE:
            raise StepError(f"row {row_id} is started, but still runs")
        self.forget(np.array([row_id]))
        self._state[row_id] = RowState.ACTIVE
        self._is_fresh[row_id] = True

    def add_pages(self, runs: Sequence[PageRun]) -> None:
        for run in runs:
            page_ids = unpack(run.page_ids, "page_ids")
            if not self.is_active(run.row_id):
                continue
            held = int(self.pages.num_pages[run.row_id])
            end = run.first + len(page_ids)
            if not 0 <= run.first <= held or end > self.pages.max_pages:
                raise StepError(
                    f"row {run.row_id} holds {held} pages of at most {self.pages.max_pages}; "
                    f"pages [{run.first}, {end}) cannot be added"
                )
            if len(page_ids) and not 0 <= page_ids.min() <= page_ids.max() < self._num_pages:
                raise StepError(
                    f"row {run.row_id} gets pages {page_ids.min()}..{page_ids.max()}, the pool "
                    f"holds [0, {self._num_pages})"
                )
            self.pages.add(run.row_id, run.first, page_ids)

    def check_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        sources = {source for source, _ in copies}
        destinations = {destination for _, destination in copies}
        for page in sources | destinations:
            if not 0 <= page < self._num_pages:
                raise StepError(f"page {page} is copied, the pool holds [0, {self._num_pages})")
        if len(destinations) != len(copies) or sources & destinations:
            raise StepError("a page is the destination of a copy and named in another")

    # ---- a step

    def check_work(self, plan: StepPlan, max_tokens: int) -> Work:
        """The plan's forward without its void rows. StepError if it does not fit the rows."""
        extends = tuple(
            self._check_extend(extend) for extend in plan.extends if self.is_active(extend.row_id)
        )
        rows = unpack(plan.decode_rows, "decode_rows").astype(np.int64)
        positions = unpack(plan.decode_positions, "decode_positions").astype(np.int64)
        if len(rows) != len(positions):
            raise StepError(f"{len(rows)} decode rows, but {len(positions)} positions")
        if len(rows):
            self._check_row_ids(rows, "decode_rows")
            state = self._state[rows]
            if (state == RowState.VOID).any():
                valid = state != RowState.VOID
                rows, positions = rows[valid], positions[valid]
            self._check_decode(rows, positions)
        work = Work(extends, rows, positions)
        self._check_size(work, max_tokens)
        return work

    def advance(self, work: Work, row_ids: Ids) -> None:
        """The forward of `work` is done or under way, and tokens of `row_ids` come of it."""
        for part in work.extends:
            self._kv_len[part.row_id] = part.cached_len + len(part.token_ids)
            self._is_fresh[part.row_id] = False
        self._kv_len[work.decode_rows] += 1
        self._has_token[row_ids] = True

    def keep_tokens(self, row_ids: Ids, tokens: torch.Tensor) -> None:
        """`tokens` [n] are what the rows decode next; below 0 (nothing could be drawn): any."""
        at = to_device(row_ids, tokens.device)
        self.last_tokens.index_copy_(0, at, tokens.clamp(min=0))

    def _check_size(self, work: Work, max_tokens: int) -> None:
        if work.num_extend_tokens > max_tokens:
            raise StepError(f"{work.num_extend_tokens} extend tokens, the limit is {max_tokens}")
        rows = [part.row_id for part in work.extends] + work.decode_rows.tolist()
        if len(set(rows)) != len(rows):
            raise StepError(f"a row stands twice in one step: {sorted(rows)}")

    def _check_extend(self, extend: Extend) -> Part:
        row, token_ids = extend.row_id, unpack(extend.token_ids, "token_ids")
        end = extend.cached_len + len(token_ids)
        room = min(int(self.pages.num_pages[row]) * self._page_size, self._context_tokens)
        if not len(token_ids) or extend.cached_len < 0 or end > room:
            raise StepError(
                f"row {row} has room for {room} tokens; positions [{extend.cached_len}, {end}) "
                f"cannot be extended"
            )
        if not self._is_fresh[row] and extend.cached_len != self._kv_len[row]:
            raise StepError(
                f"row {row} holds {self._kv_len[row]} tokens and cannot be extended at position "
                f"{extend.cached_len}"
            )
        if not 0 <= token_ids.min() <= token_ids.max() < self._vocab_size:
            raise StepError(
                f"row {row} has token ids {token_ids.min()}..{token_ids.max()}, the vocabulary is "
                f"[0, {self._vocab_size})"
            )
        return Part(row, extend.cached_len, token_ids, extend.is_last)

    def _check_decode(self, rows: Ids, positions: Ids) -> None:
        room = np.minimum(self.pages.num_pages[rows] * self._page_size, self._context_tokens)
        fits = (
            (self._state[rows] == RowState.ACTIVE)
            & self._has_token[rows]
            & (positions == self._kv_len[rows])
            & (positions < room)
        )
        if not fits.all():
            row, position = int(rows[~fits][0]), int(positions[~fits][0])
            raise StepError(
                f"row {row} cannot decode at position {position}: it is "
                f"{RowState(self._state[row]).name.lower()}, holds {self._kv_len[row]} tokens and "
                f"has room for {room[~fits][0]}"
            )

    def _check_row_ids(self, row_ids: npt.NDArray[np.integer], what: str) -> None:
        if len(row_ids) and not 0 <= row_ids.min() <= row_ids.max() < self.max_rows:
            raise StepError(
                f"{what}: row ids {row_ids.min()}..{row_ids.max()}, the limit is {self.max_rows}"
            )
