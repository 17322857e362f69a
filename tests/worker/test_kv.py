"""Pools, page copies, page table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from freetoken.worker.kv import PageTable, allocate_pools, copy_pages


@dataclass(frozen=True)
class Heads:
    num_kv_heads: int
    k_dim: int
    v_dim: int


def make_pools():
    layers = (Heads(2, 4, 3), Heads(1, 8, 8))
    return allocate_pools(
        layers, num_pages=5, page_size=2, dtype=torch.float32, device=torch.device("cpu")
    )


def test_each_layer_has_its_own_sizes_and_one_page_more_than_usable():
    pools = make_pools()
    assert [tuple(pool.shape) for pool in pools.k] == [(6, 2, 2, 4), (6, 2, 1, 8)]
    assert [tuple(pool.shape) for pool in pools.v] == [(6, 2, 2, 3), (6, 2, 1, 8)]
    assert not any(pool.any() for pool in (*pools.k, *pools.v))


def test_whole_pages_are_copied_in_every_layer_and_nothing_else():
    pools = make_pools()
    tensors = (*pools.k, *pools.v)
    for i, pool in enumerate(tensors):
        pool += torch.randn(pool.shape, generator=torch.Generator().manual_seed(i))
    before = [pool.clone() for pool in tensors]
    copy_pages(pools, [(0, 3), (0, 4), (2, 1)])
    for pool, old in zip(tensors, before, strict=True):
        assert torch.equal(pool, old[[0, 2, 2, 0, 0, 5]])


def test_the_page_table_takes_additions_and_corrections():
    table = PageTable(2, 4, torch.device("cpu"))
    table.add(1, 0, np.array([7, 8], np.int32))
    table.add(1, 1, np.array([9, 3], np.int32))
    table.flush()
    assert table.device[1, :3].tolist() == [7, 9, 3]
    assert table.num_pages.tolist() == [0, 3]
    table.clear(np.array([1]))
    assert table.num_pages.tolist() == [0, 0]
