"""The sampling kernel and its reference against a plain one-row sampler in fp64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from freetoken.kernels import reference_sample, sample_ops

SMALL = {"SHORT_ROW": 16, "CHUNK": 32, "CAPACITY": 32}


@pytest.fixture(params=["one chunk", "chunks"])
def subject(request, monkeypatch):
    """The kernel for short rows, and the one for long rows, with blocks that suit the tests."""
    from freetoken.kernels import triton_sample

    if request.param == "chunks":
        for name, value in SMALL.items():
            monkeypatch.setattr(triton_sample, name, value)
    return triton_sample.sample


def naive_tokens(logits, temperature, top_k, top_p, min_p, uniform):
    """The tokens that one row may give: one, and its neighbours where rounding could decide."""
    x = logits.double().cpu()
    if not x.max().isfinite() or x.isnan().any():
        return {-1}
    if temperature < reference_sample.MIN_TEMPERATURE:
        return {int(x.argmax())}
    weights = ((x - x.max()) / temperature).exp()
    kept = torch.ones_like(x, dtype=torch.bool)
    if top_k > 0:
        kept = x >= x.sort(descending=True).values[min(top_k, len(x)) - 1]
    falling = x.sort(descending=True)
    sums = torch.cat([torch.zeros(1), (weights * kept)[falling.indices].cumsum(0)])
    above = sums[len(x) - torch.searchsorted(falling.values.flip(0), x, right=True)]
    found = set()
    for slack in (-1e-5, 1e-5):
        passed = kept.clone()
        if top_p < 1:
            limit = top_p * (weights * kept).sum() * (1 + slack)
            passed &= (above < limit) | (x == x.max())
        passed &= weights >= min_p * (1 + slack)
        passed |= x == x.max()
        sums = (weights * passed).cumsum(0)
        for near in (-1e-6, 0.0, 1e-6):
            target = min(max(uniform + near, 0.0), 1 - 1e-12) * sums[-1]
            found.add(int((sums > target).nonzero()[0]))
    return found


def parameters(rows, device):
    temperature, top_k, top_p, min_p, uniforms = zip(*rows, strict=True)
    return (
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
        torch.tensor(uniforms, dtype=torch.float64, device=device),
    )


def check(subject, logits, rows):
    arguments = parameters(rows, logits.device)
    before = logits.clone()
    for draw in (subject, reference_sample.sample, sample_ops.sample):
        tokens = draw(logits, *arguments)
        assert tokens.shape == logits.shape[:1]
        assert tokens.dtype == torch.int64
        for i, token in enumerate(tokens.tolist()):
            assert token in naive_tokens(logits[i], *rows[i]), (draw, i, rows[i])
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def random_logits(num_rows, vocab_size, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (60, 1.0, 0.0),
    (10**6, 1.0, 0.0),
    (0, 0.0, 0.0),
    (0, 0.3, 0.0),
    (0, 0.95, 0.0),
    (0, 0.9999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (40, 0.9, 0.0),
    (50, 0.97, 0.02),
]


# All are in one batch below; these, with heats and numbers at their ends, also by themselves.
ALWAYS = ((0, 0.95, 0.0), (50, 0.97, 0.02))


@pytest.mark.parametrize(
    "filters",
    [pytest.param(each, marks=() if each in ALWAYS else pytest.mark.slow) for each in FILTERS],
    ids=str,
)
def test_filters(subject, filters, device):
    logits = random_logits(3, 70)
    logits[2].round_()
    numbers = [0.2, 1 - 2.0**-52, 0.77]
    heats = [0.3, 1.0, 3.0]
    rows = [(heat, *filters, u) for heat, u in zip(heats, numbers, strict=True)]
    check(subject, logits.to(device), rows)


def test_a_batch_of_different_rows_which_are_views(subject, device):
    logits = random_logits(len(FILTERS) + 2, 100, seed=3).to(device)[:, 20:85]
    rows = [(0.8, *filters, 0.6) for filters in FILTERS]
    rows += [(0.0, 5, 0.5, 0.1, 0.5), (1e-6, 0, 1.0, 0.0, 0.999)]
    check(subject, logits, rows)


@pytest.mark.parametrize("vocab_size", [1, 2, 16, 17, 33])
def test_small_vocabularies(subject, vocab_size, device):
    logits = random_logits(4, vocab_size, seed=vocab_size).to(device)
    check(subject, logits, [(1.0, k, p, 0.0, 0.7) for k in (0, 2) for p in (1.0, 0.6)])


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(0.0, (9, 0.9, 0.1)), (0.7, (0, 1.0, 0.0)), (0.7, (9, 0.9, 0.1))],
    ids=str,
)
def test_rows_without_a_distribution(subject, temperature, filters, device):
    logits = random_logits(5, 100).to(device)
    logits[0, 93] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    logits[3, :60] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 57] = -1e30
    check(subject, logits, [(temperature, *filters, 0.4)] * 5)


@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0)], ids=str)
def test_equals_pass_together(subject, filters, device):
    logits = torch.zeros(5, 70, device=device)
    check(subject, logits, [(1.0, *filters, u) for u in (0.0, 0.25, 0.501, 0.999, 0.03)])


def test_values_far_apart(subject, device):
    """Cuts at the middle of values would go on for long."""
    logits = -torch.logspace(-30, 30, 90).flip(0)[None].expand(2, -1).contiguous().to(device)
    check(subject, logits, [(1.0, 60, 0.3, 0.0, 0.5), (1.0, 0, 0.999, 0.0, 0.5)])


def test_a_long_row_with_blocks_as_they_are(device):
    from freetoken.kernels import triton_sample

    logits = random_logits(4, 9000, seed=5)
    logits[3, 100:] = -1e30
    rows = [(1.0, 50, 0.9, 0.0, 0.3), (1.3, 0, 0.95, 0.0, 0.9), (1.0, 0, 1.0, 0.0, 0.5)]
    rows.append((1.0, 300, 0.999, 0.01, 0.7))
    check(triton_sample.sample, logits.to(device), rows)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_row(data):
    from freetoken.kernels import triton_sample

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    levels = data.draw(st.integers(1, 40))
    size = data.draw(st.integers(1, 120))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels + 1, (1, size), generator=generator) / 3
    row = (
        data.draw(st.sampled_from([0.0, 0.1, 1.0, 4.0])),
        data.draw(st.sampled_from([0, 1, 2, 10, 50, 500])),
        data.draw(st.sampled_from([0.0, 0.11, 0.517, 0.931, 1.0])),
        data.draw(st.sampled_from([0.0, 0.013, 0.31])),
        data.draw(st.floats(0, 1, exclude_max=True)),
    )
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            for name, value in SMALL.items():
                patch.setattr(triton_sample, name, value)
        check(triton_sample.sample, logits.to(device), [row])
