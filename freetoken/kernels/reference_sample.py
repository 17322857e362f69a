"""Drawing tokens, in plain torch: the specification of the sampling kernel. See sample_ops.py.

The order is transformers': temperature, top-k, top-p, min-p. vLLM applies min-p before top-k; the
sets then differ only where top-p and min-p are used together.

The token is found by inverse CDF over the kept tokens in the order of their ids, so that logits
which differ in their last bits (another batch size) almost never change it, as they could in an
order by likelihood. Sorting whole rows is slow on a CPU, so only as many of the likeliest tokens
are sorted as the filters of a row need: CANDIDATES, in that order, then all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CANDIDATES = (64, 1024)
"""For 32 rows of 32k logits on one Zen 5 core: the likeliest 64 take 1.6 ms, 1024 take 21 ms, and a
whole sort 80 ms (2026-12-01)."""


MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy: logits divided by less leave one token anyway, or overflow."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Per row, [m] each: temperature > 0, top_k (0: none), top_p (1: none), min_p (0: none)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, rows: Tensor) -> Filters:
        """The parameters of the rows at indices or where true in `rows`."""
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def is_any(self) -> Tensor:
        """[m] bool: rows from which some tokens are excluded."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """See sample_ops.sample."""
    random = temperature >= MIN_TEMPERATURE
    filters = Filters(temperature, top_k.long(), top_p, min_p)
    if random.all():
        tokens, is_sound = draw(logits, filters, uniforms)
        return tokens.masked_fill_(~is_sound, -1)
    best, tokens = logits.max(dim=-1)
    random &= best.isfinite()
    if random.any():
        tokens[random], _ = draw(logits[random], filters.take(random), uniforms[random])
    return tokens.masked_fill_(~best.isfinite(), -1)


def draw(logits: Tensor, filters: Filters, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """([m] int64 tokens, [m] bool: the row had a distribution, no NaN).

    logits: [m, V] f32 · uniforms: [m] f64 in [0, 1).
    """
    best = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - best) / filters.temperature[:, None]
    is_sound = best[:, 0].isfinite()
    tokens = torch.zeros_like(is_sound, dtype=torch.int64)
    filtered = filters.is_any()
    for rows, draw_rows in ((~filtered, _draw_plain), (filtered, _draw_filtered)):
        if rows.all():
            return draw_rows(scaled, filters, uniforms), is_sound
        if rows.any():
            tokens[rows] = draw_rows(scaled[rows], filters.take(rows), uniforms[rows])
    return tokens, is_sound


def keep(values: Tensor, total: Tensor, filters: Filters) -> Tensor:
    """[m, n] bool: which of the likeliest n tokens pass all filters.

    values: [m, n], log weights in falling order, the first is 0 · total: [m], the weight of the
    whole row, the tokens beyond the n included. At least the likeliest is kept. Tokens as likely
    as the last one that passes pass too, so that the set does not depend on how ties were sorted
    (they are common in bf16 logits; transformers does so for top-k, not for top-p).
    """
    num_values = values.shape[1]
    has_k = filters.top_k > 0
    kth = values.gather(1, (filters.top_k - 1).clamp(0, num_values - 1)[:, None])
    in_k = (values >= kth) | ~has_k[:, None]
    weights = values.exp() * in_k
    total = torch.where(has_k, weights.sum(-1), total)
    before = weights.cumsum(-1) - weights
    in_p = (before < filters.top_p[:, None] * total[:, None]) | (filters.top_p >= 1)[:, None]
    in_p[:, 0] = True
    in_p = values >= values.masked_fill(~in_p, torch.inf).amin(-1, keepdim=True)
    return in_k & in_p & (weights >= filters.min_p[:, None])


def suffices(values: Tensor, total: Tensor, filters: Filters) -> Tensor:
    """[m] bool: no token beyond the likeliest n passes the filters; arguments as in `keep`."""
    num_values = values.shape[1]
    has_k = filters.top_k > 0
    last = values[:, -1]
    kth = values.gather(1, (filters.top_k - 1).clamp(0, num_values - 1)[:, None])[:, 0]
    k_within = has_k & (filters.top_k <= num_values) & (last < kth)
    # The mass before any tie with tokens beyond; rounding may only send a row to the whole sort.
    mass = (values.exp() * (values > last[:, None])).sum(-1)
    p_within = (filters.top_p < 1) & (mass >= filters.top_p * total * (1 + 1e-5))
    m_within = (filters.min_p > 0) & (last.exp() < filters.min_p)
    return torch.where(has_k, k_within, p_within | m_within)


def _draw_plain(scaled: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    return _pick(scaled.exp(), uniforms)


def _draw_filtered(scaled: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    total = scaled.exp().sum(-1)
    tokens = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    rows = torch.arange(len(scaled), device=scaled.device)  # those still without a token
    vocab_size = scaled.shape[1]
    for num_values in (*(n for n in CANDIDATES if n < vocab_size), vocab_size):
        if num_values < vocab_size:
            values, ids = scaled.topk(num_values, dim=-1)
            enough = suffices(values, total, filters)
        else:
            values, ids = scaled.sort(dim=-1, descending=True, stable=True)
            enough = torch.ones_like(rows, dtype=torch.bool)
        # A row that needs more values is drawn again.
        tokens[rows] = _draw_sorted(values, ids, total, filters, uniforms)
        if enough.all():
            break
        rest = ~enough
        scaled, total, rows = scaled[rest], total[rest], rows[rest]
        filters, uniforms = filters.take(rest), uniforms[rest]
    return tokens


def _draw_sorted(
    values: Tensor, ids: Tensor, total: Tensor, filters: Filters, uniforms: Tensor
) -> Tensor:
    weights = values.exp() * keep(values, total, filters)
    ids, order = ids.sort(dim=-1)
    chosen = _pick(weights.gather(1, order), uniforms)
    return ids.gather(1, chosen[:, None])[:, 0]


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[m] indices into weights [m, n]: the first whose running sum exceeds u · total."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, targets, right=True)[:, 0]
    return found.clamp(max=weights.shape[1] - 1)
