"""Plain extends through the libraries: the merge, and cuDNN where it exists."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import reference_attention as reference
from tests.kernels.attention_cases import TOLERANCES


def with_lse(query, key, value, sees):
    """Attention in plain torch, and the logarithms of its sums: [Lq, H, D], [Lq, H]."""
    group = query.shape[1] // key.shape[1]
    k, v = (tensor.float().repeat_interleave(group, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * 0.3
    scores = scores.masked_fill(~sees, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.to(query.dtype), scores.logsumexp(-1).T


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (6, 1, 24), (40, 8, 128)])
def test_a_merge_is_attention_over_both(heads, kv_heads, size, kernel_dtype, device):
    from freetoken.kernels.library_attention import merge

    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(length, count, size, generator=generator).to(device, kernel_dtype)
        for length, count in ((5, heads), (12, kv_heads), (12, kv_heads))
    )
    causal = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    parts = (
        *with_lse(query, key[:7], value[:7], torch.ones_like(causal)[:, :1]),
        *with_lse(query, key[7:], value[7:], causal),
    )
    expected = reference.extend_attention(query, key, value, scaling=0.3)
    got, lse = merge(*parts)
    torch.testing.assert_close(got, expected, **TOLERANCES[kernel_dtype])
    whole = torch.cat([torch.ones_like(causal)[:, :1].expand(5, 7), causal], 1)
    torch.testing.assert_close(lse, with_lse(query, key, value, whole)[1], rtol=1e-3, atol=1e-3)
    # The parts may be views.
    parts = [torch.stack([part, part], 1)[:, 1] for part in parts]
    torch.testing.assert_close(merge(*parts)[0], expected, **TOLERANCES[kernel_dtype])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_queries", [70, 200])
@pytest.mark.parametrize("size", [64, 80, 128])
def test_the_libraries_agree(num_queries, size, monkeypatch, device):
    from freetoken.kernels import library_attention as subject

    monkeypatch.setattr(subject, "TILE_TOKENS", 64)
    query, key, value = (
        torch.randn(length, count, size, device=device, dtype=torch.bfloat16)
        for length, count in ((num_queries, 8), (200, 2), (200, 2))
    )
    got = subject.plain_attention(query, key, value, size**-0.5)
    expected = reference.extend_attention(query, key, value, scaling=size**-0.5)
    torch.testing.assert_close(got, expected, **TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("is_head_major", [False, True])
def test_tiles_have_the_same_strides_whatever_they_are_cut_from(is_head_major):
    """Otherwise each new length of a prompt would cost plans of cuDNN's, 70 ms each."""
    from freetoken.kernels.library_attention import _token_major

    strides = set()
    for length in (40, 50):
        shape = (4, length, 16) if is_head_major else (length, 4, 16)
        whole = torch.zeros(shape).transpose(0, 1) if is_head_major else torch.zeros(shape)
        strides.add(_token_major(whole[8:24]).stride())
    assert len(strides) == 1
