"""Writing k/v to the pools: the kernel against the reference, which is a plain loop here."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import attention_ops
from freetoken.kernels import reference_attention as reference

PAGES, ROWS = 7, 3


def make(num_tokens, page_size, kv_heads, k_size, v_size, device, dtype):
    generator = torch.Generator().manual_seed(0)
    # One projection gives both; its heads lie apart.
    wide = torch.randn(num_tokens, kv_heads, k_size + v_size + 3, generator=generator)
    wide = wide.to(device, dtype)
    key, value = wide[..., :k_size], wide[..., k_size : k_size + v_size]
    pools = [
        torch.zeros(PAGES, page_size, kv_heads, size, device=device, dtype=dtype)
        for size in (k_size, v_size)
    ]
    return key, value, pools


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("kv_heads", "k_size", "v_size"), [(2, 16, 16), (1, 80, 8), (3, 5, 24)])
def test_slots(page_size, kv_heads, k_size, v_size, kernel_dtype, device):
    from freetoken.kernels import triton_store as subject

    key, value, pools = make(5, page_size, kv_heads, k_size, v_size, device, kernel_dtype)
    slots = torch.tensor([3, 0, 6, 1, 5], device=device)
    expected = [pool.clone() for pool in pools]
    for token, slot in enumerate(slots.tolist()):
        page, place = divmod(slot, page_size)
        expected[0][page, place], expected[1][page, place] = key[token], value[token]
    for store in (subject.store_kv, reference.store_kv, attention_ops.store_kv):
        got = [pool.clone() for pool in pools]
        store(key, value, *got, slots)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("padding", [None, 0, 2])
def test_pages_and_padding(page_size, padding, kernel_dtype, device):
    from freetoken.kernels import triton_store as subject

    real = [(2, 0), (2, 1), (0, 2 * page_size - 1), (1, page_size)]
    places = real + [(10**6, 10**6)] * (padding or 0)
    key, value, pools = make(len(places), page_size, 2, 8, 4, device, kernel_dtype)
    page_table = torch.tensor([[4, 1], [0, 5], [3, 2]], dtype=torch.int32, device=device)
    rows = torch.tensor([row for row, _ in places], device=device)
    positions = torch.tensor([position for _, position in places], device=device)
    num_tokens = None
    if padding is not None:
        num_tokens = torch.tensor([len(real)], dtype=torch.int32, device=device)
    expected = [pool.clone() for pool in pools]
    for token, (row, position) in enumerate(real):
        page, place = int(page_table[row, position // page_size]), position % page_size
        expected[0][page, place], expected[1][page, place] = key[token], value[token]
    for store in (subject.store_kv_paged, reference.store_kv_paged, attention_ops.store_kv_paged):
        got = [pool.clone() for pool in pools]
        store(key, value, *got, page_table, rows, positions, num_tokens)
        # All but the sentinel page, whose contents nobody reads.
        assert all(torch.equal(a[:-1], b[:-1]) for a, b in zip(got, expected, strict=True))
        assert padding or not got[0][-1].any()


def test_no_tokens(device):
    from freetoken.kernels import triton_store as subject

    key, value, pools = make(0, 4, 2, 8, 8, device, torch.float32)
    subject.store_kv(key, value, *pools, torch.empty(0, dtype=torch.int64, device=device))
    assert not pools[0].any()
