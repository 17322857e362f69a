"""The k largest: the kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import reference_topk, sample_ops


def check(scores: torch.Tensor, k: int) -> None:
    from freetoken.kernels import triton_topk as subject

    for choose in (subject.top_k, sample_ops.top_k):
        values, ids = (tensor.cpu() for tensor in choose(scores, k))
        # On the CPU: CUDA's sort takes a NaN with its sign bit set for the smallest.
        expected, expected_ids = reference_topk.top_k(scores.cpu(), k)
        assert values.dtype == scores.dtype
        assert ids.dtype == torch.int64
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def random_scores(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "k"),
    [(1, 128, 8), (5, 60, 4), (3, 8, 8), (2, 1, 1), (2, 1000, 64), (4, 384, 1), (0, 16, 2)],
)
def test_random_rows(num_rows, num_columns, k, device):
    check(random_scores(num_rows, num_columns).to(device), k)


def test_ties_go_to_the_lowest_index(device):
    check(random_scores(6, 100).round().to(device), 20)
    check(torch.zeros(2, 33, device=device), 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types(dtype, device):
    check(random_scores(4, 90).to(device, dtype), 12)


def test_views_and_special_values(device):
    scores = random_scores(8, 40).to(device)
    scores[0, 3], scores[0, 7], scores[1, 5] = torch.nan, torch.inf, -torch.nan
    scores[2], scores[3, ::2], scores[4] = -torch.inf, -torch.inf, -0.0
    scores[4, 1::2] = 0.0
    scores[5] = -scores[5].abs()
    check(scores, 6)
    check(scores[::2, :30], 6)
    check(scores.T, 3)
