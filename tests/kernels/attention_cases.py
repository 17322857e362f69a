"""Flat batches over paged pools, for the attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCES = {
    # The order of fp32 sums differs; half types round the weights and the output.
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


@dataclass
class Batch:
    """The arguments of paged_attention; pages behind the rows' ends hold NaN."""

    query: Tensor
    k_pool: Tensor
    v_pool: Tensor
    page_table: Tensor
    rows: Tensor
    positions: Tensor
    num_tokens: Tensor | None

    def arguments(self):
        return (
            self.query,
            self.k_pool,
            self.v_pool,
            self.page_table,
            self.rows,
            self.positions,
            self.num_tokens,
        )


def make_batch(
    segments: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    k_size: int = 16,
    v_size: int = 16,
    page_size: int = 4,
    padding: int = 0,
    max_pages: int = 0,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Batch:
    """segments: for each row (tokens cached, new tokens); pages are shuffled over the pool."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    pages_of = [-(-(cached + new) // page_size) for cached, new in segments]
    num_pages = sum(pages_of) + 1
    order = torch.randperm(num_pages - 1, generator=generator).int()
    page_table = torch.full(
        (len(segments) + 1, max(max_pages, *pages_of)), 10**6, dtype=torch.int32
    )
    k_pool = torch.full((num_pages, page_size, kv_heads, k_size), torch.nan)
    v_pool = torch.full((num_pages, page_size, kv_heads, v_size), torch.nan)
    k_pool, v_pool = k_pool.to(device, dtype), v_pool.to(device, dtype)
    rows, positions, taken = [], [], 0
    for row, ((cached, new), pages) in enumerate(zip(segments, pages_of, strict=True)):
        mine = order[taken : taken + pages]
        taken += pages
        page_table[row, :pages] = mine
        at = torch.arange(cached + new)
        slots = (mine[at // page_size].long() * page_size + at % page_size).to(device)
        k_pool.flatten(0, 1)[slots] = rand(cached + new, kv_heads, k_size)
        v_pool.flatten(0, 1)[slots] = rand(cached + new, kv_heads, v_size)
        rows += [row] * new
        positions += range(cached, cached + new)
    total = len(rows)
    # Padding carries numbers that would be out of range if they were used.
    rows += [10**6] * padding
    positions += [10**6] * padding
    query = rand(total + padding, heads, 2 * k_size)[..., :k_size]
    return Batch(
        query,
        k_pool,
        v_pool,
        page_table.to(device),
        torch.tensor(rows, device=device),
        torch.tensor(positions, device=device),
        torch.tensor([total], dtype=torch.int32, device=device) if padding else None,
    )
