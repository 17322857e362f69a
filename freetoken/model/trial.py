"""Runs token sequences through a ServedModel the way the scheduler would, in small pools.

The self-check and the tests compare its logits with those of plain transformers. It knows nothing
of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from freetoken.model.context import KvPools, Segment, StepContext
from freetoken.model.open_pass import OpenPass
from freetoken.model.served import ServedModel

PAGE_SIZE = 4


@dataclass(frozen=True, slots=True)
class Part:
    """The next `length` tokens of a row."""

    row: int
    length: int


class Trial:
    """Rows of token ids, served step by step; pages are handed out in a shuffled order.

    rows: the token ids of each row, [L] int64 cpu · num_padding: tokens that mean nothing at the
    end of each on-demand step, as CUDA graphs have them.
    """

    def __init__(
        self,
        model: ServedModel,
        rows: Sequence[torch.Tensor],
        *,
        seed: int = 0,
        page_size: int = PAGE_SIZE,
        num_padding: int = 0,
    ) -> None:
        self._model = model
        self._rows = rows
        self._page_size = page_size
        self._num_padding = num_padding
        self._cached = [0] * len(rows)
        self._logits: list[list[torch.Tensor]] = [[] for _ in rows]
        self._open_parts: Sequence[Part] = ()
        max_pages = -(-max(len(row) for row in rows) // page_size)
        num_pages = max_pages * len(rows)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_pages, generator=generator)
        self._page_table = order.view(len(rows), max_pages).to(model.device, torch.int32)
        self.pools = make_pools(model, num_pages, page_size)

    def step(self, *parts: Part) -> None:
        """One on-demand step with these parts, in this order."""
        ids, context, at = self._plan(parts)
        # On a GPU steps are served with a count of tokens: kernels without it are others, which
        # would be compiled for this alone.
        if self._num_padding or self._model.device.type == "cuda":
            ids, context = _pad(ids, context, self._num_padding)
        self._keep(parts, self._model.forward(ids, context, at))

    def run_pass(self, *parts: Part, chunk_tokens: int) -> None:
        """One pass with these parts."""
        ids, context, at = self._plan(parts)
        self._keep(parts, self._model.forward_pass(ids, context, at, chunk_tokens))

    def start_pass(self, *parts: Part, chunk_tokens: int) -> OpenPass:
        """Open a pass with these parts; other rows may step until `finish_pass`."""
        ids, context, at = self._plan(parts)
        self._open_parts = parts
        return self._model.start_pass(ids, context, at, chunk_tokens)

    def finish_pass(self, open_pass: OpenPass) -> None:
        """Take the logits of a pass that is done."""
        self._keep(self._open_parts, open_pass.logits())

    def share_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Let `target` start with `source`'s first tokens; a page used in part is copied."""
        assert self._cached[target] == 0
        assert torch.equal(self._rows[source][:num_tokens], self._rows[target][:num_tokens])
        full = num_tokens // self._page_size
        self._page_table[target, :full] = self._page_table[source, :full]
        if num_tokens % self._page_size:
            old, new = int(self._page_table[source, full]), int(self._page_table[target, full])
            for pool in (*self.pools.k, *self.pools.v):
                pool[new] = pool[old]
        self._cached[target] = num_tokens

    def logits(self, row: int) -> torch.Tensor:
        """[tokens stepped so far, V] float32 of this row."""
        return torch.cat(self._logits[row])

    def _plan(self, parts: Sequence[Part]) -> tuple[torch.Tensor, StepContext, torch.Tensor]:
        ids, positions, rows, segments = [], [], [], []
        start = 0
        for part in parts:
            cached = self._cached[part.row]
            ids.append(self._rows[part.row][cached : cached + part.length])
            positions.append(torch.arange(cached, cached + part.length))
            rows.append(torch.full((part.length,), part.row))
            segments.append(Segment(part.row, start, part.length, cached))
            start += part.length
        device = self._model.device
        context = StepContext(
            torch.cat(positions).to(device),
            torch.cat(rows).to(device),
            self._page_table,
            tuple(segments),
            self.pools,
        )
        return torch.cat(ids).to(device), context, torch.arange(start, device=device)

    def _keep(self, parts: Sequence[Part], logits: torch.Tensor) -> None:
        logits = logits.cpu()
        start = 0
        for part in parts:
            self._logits[part.row].append(logits[start : start + part.length])
            self._cached[part.row] += part.length
            start += part.length


def make_pools(model: ServedModel, num_pages: int, page_size: int = PAGE_SIZE) -> KvPools:
    """Zeroed pools of `num_pages` pages and the sentinel, for every attention layer."""
    dtype, device = model.shape.dtype, model.device

    def pool(num_heads: int, size: int) -> torch.Tensor:
        shape = (num_pages + 1, page_size, num_heads, size)
        return torch.zeros(shape, dtype=dtype, device=device)

    return KvPools(
        k=tuple(pool(kv.num_kv_heads, kv.k_dim) for kv in model.shape.kv),
        v=tuple(pool(kv.num_kv_heads, kv.v_dim) for kv in model.shape.kv),
        page_size=page_size,
    )


def _pad(
    ids: torch.Tensor, context: StepContext, num_padding: int
) -> tuple[torch.Tensor, StepContext]:
    """The step as a CUDA graph has it: tokens that mean nothing at its end."""
    zeros = ids.new_zeros(num_padding)
    num_tokens = torch.tensor([len(ids)], dtype=torch.int32, device=ids.device)
    context = replace(
        context,
        positions=torch.cat([context.positions, zeros]),
        rows=torch.cat([context.rows, zeros]),
        num_tokens=num_tokens,
    )
    return torch.cat([ids, zeros]), context
