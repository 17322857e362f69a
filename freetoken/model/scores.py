"""How scores become probabilities, in plain torch: scale, softcap, sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

MAX_SCORES = 1 << 24
"""Scores (fp32) that exist at a time in layers with softcap or sinks; the memory plan prices them.
"""


class Scores:
    """How scores become probabilities in this layer: scale, softcap and sinks."""

    __slots__ = ("scaling", "sinks", "softcap")

    def __init__(
        self, scaling: float | None, softcap: float | None, sinks: torch.Tensor | None
    ) -> None:
        self.scaling = scaling
        self.softcap = softcap
        self.sinks = sinks

    @property
    def is_plain(self) -> bool:
        """True if scaled_dot_product_attention computes it."""
        return self.softcap is None and self.sinks is None

    def scale_of(self, query: torch.Tensor) -> float:
        """The factor of the scores; query: [*, Dk]."""
        return query.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        causal: bool,
        folded: bool = False,
    ) -> torch.Tensor:
        """q: [B, H, T, Dk], k: [B, G, L, Dk], v: [B, G, L, Dv] → [B, H, T, Dv].

        `folded`: the head dimension of q is G, its T dimension holds the heads of a kv head.
        `causal`: T = L and token i sees keys up to i.
        """
        if self.is_plain:
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias,
                is_causal=causal,
                scale=self.scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        # The scores exist here as a whole: for a few queries at a time, so that they stay small.
        batch, heads, num_queries, _ = q.shape
        block = max(1, MAX_SCORES // (batch * heads * k.shape[2]))
        if folded or block >= num_queries:
            return self._attend(q, k, v, bias, 0 if causal else None, folded)
        parts = []
        for first in range(0, num_queries, block):
            queries = slice(first, first + block)
            part_bias = bias[queries] if bias is not None else None
            at = first if causal else None
            parts.append(self._attend(q[:, :, queries], k, v, part_bias, at, folded))
        return torch.cat(parts, 2)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        causal_at: int | None,
        folded: bool,
    ) -> torch.Tensor:
        """`causal_at`: the position of the first query, which sees keys up to itself."""
        batch, heads, num_queries, size = q.shape
        kv_heads, num_keys = k.shape[1:3]
        grouped = q.float().reshape(batch, kv_heads, -1, size)
        weights = (grouped @ k.float().transpose(2, 3)).mul_(self.scale_of(q))
        weights = weights.view(batch, heads, num_queries, num_keys)
        if self.softcap is not None:
            weights = weights.div_(self.softcap).tanh_().mul_(self.softcap)
        if bias is not None:
            weights += bias
        elif causal_at is not None:
            ahead = torch.ones(weights.shape[2:], dtype=torch.bool, device=q.device)
            weights.masked_fill_(ahead.triu_(1 + causal_at), float("-inf"))
        weights = self._softmax(weights, folded).reshape(batch, kv_heads, -1, num_keys)
        return (weights @ v.float()).view(batch, heads, num_queries, -1).to(q.dtype)

    def _softmax(self, weights: torch.Tensor, folded: bool) -> torch.Tensor:
        if self.sinks is None:
            return weights.softmax(-1)
        # A sink is one more score that takes part in the softmax and has no value.
        sinks = self.sinks.float()
        shape = (1, *weights.shape[1:3], 1) if folded else (1, -1, 1, 1)
        sinks = sinks.reshape(shape).expand(*weights.shape[:3], 1)
        return torch.cat([weights, sinks], -1).softmax(-1)[..., :-1]
