"""Attention with softcap or sinks: queries in blocks give what all at once give."""

from __future__ import annotations

import pytest
import torch

from freetoken.model import scores as scores_file
from freetoken.model.scores import Scores


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Head by head, as the formula says."""
    heads, size = q.shape[1], q.shape[3]
    outputs = []
    for head in range(heads):
        kv_head = head * k.shape[1] // heads
        weights = q[0, head] @ k[0, kv_head].T * size**-0.5
        if scores.softcap is not None:
            weights = torch.tanh(weights / scores.softcap) * scores.softcap
        weights = weights + bias
        if scores.sinks is not None:
            sink = scores.sinks[head].expand(len(weights), 1)
            weights = torch.cat([weights, sink], 1)
        outputs.append(weights.softmax(-1)[:, : k.shape[2]] @ v[0, kv_head])
    return torch.stack(outputs)[None]


@pytest.mark.parametrize("max_scores", [1, 100, 1 << 24])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["softcap", "sinks"])
def test_blocks_of_queries_equal_the_formula(
    monkeypatch: pytest.MonkeyPatch, kind: str, causal: bool, max_scores: int
) -> None:
    monkeypatch.setattr(scores_file, "MAX_SCORES", max_scores)
    num_queries, num_keys = 7, 7 if causal else 12
    q = random(1, 6, num_queries, 8, seed=0)
    k, v = random(1, 2, num_keys, 8, seed=1), random(1, 2, num_keys, 5, seed=2)
    sinks = random(6, seed=3) if kind == "sinks" else None
    scores = Scores(None, 2.0 if kind == "softcap" else None, sinks)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    found = scores.attend(q, k, v, None if causal else bias, causal=causal)
    torch.testing.assert_close(found, naive(q, k, v, bias, scores), rtol=1e-5, atol=1e-6)
