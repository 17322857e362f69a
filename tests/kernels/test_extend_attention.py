"""The flash kernel for extends against its reference, and the choice between it and SDPA."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import reference_attention as reference
from freetoken.kernels.attention_ops import extend_attention
from tests.kernels.attention_cases import TOLERANCES


def make_tensors(
    num_queries, num_keys, heads=4, kv_heads=2, k_size=16, v_size=16, *, device, dtype
):
    """query, key, value as views of wider tensors, as projections give them."""
    generator = torch.Generator().manual_seed(num_queries)

    def rand(length, heads, size):
        wide = torch.randn(heads, length, size + 8, generator=generator)
        return wide.to(device, dtype).transpose(0, 1)[..., :size]

    return (
        rand(num_queries, heads, k_size),
        rand(num_keys, kv_heads, k_size),
        rand(num_keys, kv_heads, v_size),
    )


def check(tensors, small=True, **how):
    from freetoken.kernels import triton_extend as subject

    tiling = subject.Tiling(16, 16, 4, 1) if small else None
    how = {"scaling": 0.3, **how}
    expected = reference.extend_attention(*tensors, **how)
    got = subject.extend_attention(*tensors, tiling=tiling, **how)
    assert got.dtype == tensors[0].dtype
    torch.testing.assert_close(got, expected, **TOLERANCES[got.dtype])


def test_the_reference_is_paged_attention_of_one_row():
    query, key, value = make_tensors(5, 9, device=torch.device("cpu"), dtype=torch.float32)
    how = {"scaling": 0.3, "window": 4, "softcap": 2.0, "sinks": torch.randn(4)}
    expected = reference.paged_attention(
        query,
        key[:, None],
        value[:, None],
        torch.arange(9, dtype=torch.int32)[None],
        torch.zeros(5, dtype=torch.int64),
        torch.arange(4, 9),
        None,
        **how,
    )
    got = reference.extend_attention(query, key, value, **how)
    torch.testing.assert_close(got, expected)


def test_the_reference_goes_over_queries_in_blocks(monkeypatch):
    tensors = make_tensors(7, 12, device=torch.device("cpu"), dtype=torch.float32)
    whole = reference.extend_attention(*tensors, scaling=0.3, window=5)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 12 * 3)
    torch.testing.assert_close(reference.extend_attention(*tensors, scaling=0.3, window=5), whole)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (33, 33), (1, 40), (21, 70)])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40])
def test_lengths_and_windows(num_queries, num_keys, window, device):
    tensors = make_tensors(num_queries, num_keys, device=device, dtype=torch.float32)
    check(tensors, window=window)


@pytest.mark.parametrize("how", [{}, {"softcap": 1.5}, {"window": 9}], ids=str)
@pytest.mark.parametrize("has_sinks", [True, False])
def test_sinks_and_softcap(how, has_sinks, kernel_dtype, device):
    tensors = make_tensors(20, 37, device=device, dtype=kernel_dtype)
    sinks = torch.tensor([1.0, -2.0, 0.0, 3.0], device=device, dtype=kernel_dtype)
    check(tensors, sinks=sinks if has_sinks else None, **how)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 1, "kv_heads": 1},
        {"heads": 3, "kv_heads": 3},
        {"heads": 6, "kv_heads": 1},
        {"k_size": 80, "v_size": 80},
        {"k_size": 96, "v_size": 64},
        {"k_size": 24, "v_size": 12},
        {"k_size": 192, "v_size": 128},
        {"k_size": 256, "v_size": 256},
    ],
    ids=str,
)
def test_heads_and_sizes(shape, kernel_dtype, device):
    check(make_tensors(10, 26, device=device, dtype=kernel_dtype, **shape), window=12)
    check(make_tensors(10, 26, device=device, dtype=kernel_dtype, **shape), small=False)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(6, 6), (6, 15), (1, 15)])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("k_size", [16, 80])
@pytest.mark.parametrize("how", [{}, {"window": 15}, {"window": 3}, {"softcap": 2.0}], ids=str)
def test_whatever_is_chosen_is_right(
    num_queries, num_keys, kv_heads, k_size, how, kernel_dtype, device
):
    tensors = make_tensors(
        num_queries, num_keys, 4, kv_heads, k_size, 16, device=device, dtype=kernel_dtype
    )
    got = extend_attention(*tensors, scaling=0.3, **how)
    expected = reference.extend_attention(*tensors, scaling=0.3, **how)
    torch.testing.assert_close(got, expected, **TOLERANCES[kernel_dtype])
