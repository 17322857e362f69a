"""Extends through the libraries: the cuts, the merge, and cuDNN where it exists."""

from __future__ import annotations

from random import Random

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


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "pieces"),
    [
        (64, 64, [(64, 64)]),
        (32, 96, [(32, 32)]),
        (48, 48, [(48, 64)]),
        (47, 47, [(32, 32), (47, None)]),
        (24, 24, [(24, 32)]),
        (23, 23, [(23, None)]),
        (23, 87, [(23, None)]),
        (20, 40, [(20, None)]),  # 12 and 8: one call
        (20, 60, [(20, None)]),  # 20 of the second tile
        (63, 64, [(63, 64)]),
        (100, 128, [(4, None), (36, 32), (100, 64)]),
        (127, 128, [(63, 64), (127, 64)]),
        (200, 220, [(12, None), (44, 32), (108, 64), (172, 64), (200, 32)]),
    ],
)
def test_queries_are_cut_at_tiles(num_queries, num_keys, pieces):
    from freetoken.kernels.library_attention import cut_queries

    got = cut_queries(num_queries, num_keys, (64, 32))
    assert [(piece.hi, piece.tile) for piece in got] == pieces
    assert [piece.lo for piece in got] == [0, *(hi for hi, _ in pieces)][:-1]


def plain_cudnn(query, key, value, is_causal, scaling):
    """In plain torch what cuDNN is asked for: tiles of two sizes."""
    assert len(query) == len(key) == len(value)
    assert len(query) in (16, 8)
    assert query.is_contiguous(), "it would be copied for every tile of keys"
    sees = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
    return with_lse(query, key, value, sees.tril() if is_causal else sees)


@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(16, 16), (16, 48), (13, 13), (13, 45), (13, 48), (12, 31)]
)
def test_padded_tiles_are_attention(num_queries, num_keys, has_sinks, monkeypatch, device):
    from freetoken.kernels import library_attention as subject

    monkeypatch.setattr(subject, "_cudnn", plain_cudnn)
    generator = torch.Generator().manual_seed(num_queries)
    # Views, as a joint product of queries, keys and values leaves them.
    joint = torch.randn(num_keys, 8, 24, generator=generator).to(device)
    query, key, value = joint.split([4, 2, 2], 1)
    query = query[-num_queries:]
    sinks = torch.tensor([1.0, -2.0, 0.0, 3.0], device=device) if has_sinks else None
    got = subject.attend_tile(query, key, value, 0.3, sinks, 16)
    expected = reference.extend_attention(query, key, value, scaling=0.3, sinks=sinks)
    torch.testing.assert_close(got, expected, **TOLERANCES[torch.float32])


@pytest.mark.filterwarnings("ignore:overflow encountered")  # as meant: e to a large sink is inf
def test_sinks_may_be_of_any_size(monkeypatch, device):
    from freetoken.kernels import library_attention as subject

    monkeypatch.setattr(subject, "_cudnn", plain_cudnn)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 32, 5, 16, generator=generator).to(device).unbind()
    sinks = torch.tensor([-torch.inf, -6e4, 80.0, 6e4, 3e38], device=device)
    got = subject.attend_tile(query[16:], key, value, 0.3, sinks, 16)
    expected = reference.extend_attention(query[16:], key, value, scaling=0.3, sinks=sinks)
    torch.testing.assert_close(got, expected, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_any_lengths_are_attention(seed, has_sinks, monkeypatch, device):
    from freetoken.kernels import library_attention as subject

    monkeypatch.setattr(subject, "_cudnn", plain_cudnn)
    monkeypatch.setattr(subject, "_has_cudnn", lambda *how: True)
    monkeypatch.setattr(subject, "TILE_SIZES", (16, 8))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    random = Random(seed)
    num_keys = random.randint(1, 70)
    num_queries = random.randint(1, num_keys)
    generator = torch.Generator().manual_seed(seed)
    joint = torch.randn(num_keys, 8, 24, generator=generator).to(device)
    query, key, value = joint.split([4, 2, 2], 1)
    query = query[-num_queries:]
    sinks = torch.tensor([1.0, -2.0, 0.0, 3.0], device=device) if has_sinks else None
    got = subject.attend(query, key, value, 0.3, sinks)
    expected = reference.extend_attention(query, key, value, scaling=0.3, sinks=sinks)
    torch.testing.assert_close(got, expected, **TOLERANCES[torch.float32])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(70, 200), (200, 200), (190, 200)])
@pytest.mark.parametrize("size", [64, 80, 128])
def test_the_libraries_agree(num_queries, num_keys, size, has_sinks, monkeypatch, device):
    from freetoken.kernels import library_attention as subject

    monkeypatch.setattr(subject, "TILE_SIZES", (64, 32))
    query, key, value = (
        torch.randn(length, count, size, device=device, dtype=torch.bfloat16)
        for length, count in ((num_queries, 8), (num_keys, 2), (num_keys, 2))
    )
    sinks = torch.randn(8, device=device, dtype=torch.bfloat16) if has_sinks else None
    got = subject.attend(query, key, value, size**-0.5, sinks)
    expected = reference.extend_attention(query, key, value, scaling=size**-0.5, sinks=sinks)
    torch.testing.assert_close(got, expected, **TOLERANCES[torch.bfloat16])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
    reason="needs a GPU whose cuDNN is used",
)
@pytest.mark.parametrize("size", [64, 128])
def test_cudnn_is_found_right(size, device):
    """Whole tiles: what its absence costs is speed, which no other test would notice."""
    from freetoken.kernels.library_attention import _has_cudnn

    assert _has_cudnn(device, torch.bfloat16, size, 8)
