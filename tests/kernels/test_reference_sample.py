"""Which tokens pass, against transformers' processors; the short cut against the whole sort."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as hf

from freetoken.kernels import reference_sample as subject
from freetoken.kernels.reference_sample import Filters, draw, keep, suffices


def make_filters(num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Filters(
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k, dtype=torch.int64),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
    )


def random_logits(num_rows, vocab_size, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def kept_ids(logits, filters):
    """Sets of token ids that pass, per row."""
    scaled = logits - logits.amax(-1, keepdim=True)
    values, ids = scaled.sort(descending=True, stable=True)
    passed = keep(values, scaled.exp().sum(-1), filters)
    return [set(ids[i][passed[i]].tolist()) for i in range(len(logits))]


def finite_ids(scores):
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in scores]


@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(top_p):
    logits = random_logits(40, 500)
    assert kept_ids(logits, make_filters(40, top_p=top_p)) == finite_ids(
        hf.TopPLogitsWarper(top_p)(None, logits)
    )


@pytest.mark.parametrize("top_k", [1, 7, 500, 600])
def test_top_k_keeps_what_transformers_keeps_ties_included(top_k):
    logits = random_logits(40, 500).round(decimals=1)
    assert kept_ids(logits, make_filters(40, top_k=top_k)) == finite_ids(
        hf.TopKLogitsWarper(top_k)(None, logits)
    )


@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.9, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p):
    logits = random_logits(40, 500)
    assert kept_ids(logits, make_filters(40, min_p=min_p)) == finite_ids(
        hf.MinPLogitsWarper(min_p)(None, logits)
    )


def test_all_filters_together_keep_what_transformers_keeps():
    logits = random_logits(40, 500)
    scores = hf.TopKLogitsWarper(60)(None, logits)
    scores = hf.TopPLogitsWarper(0.9)(None, scores)
    scores = hf.MinPLogitsWarper(0.02)(None, scores)
    assert kept_ids(logits, make_filters(40, top_k=60, top_p=0.9, min_p=0.02)) == finite_ids(scores)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"top_k": 3},
        {"top_k": 64},
        {"top_k": 100},
        {"min_p": 0.3},
        {"min_p": 1e-6},
        {"top_k": 500, "top_p": 0.8},
        {"top_p": 0.99, "min_p": 0.2},
        {"temperature": 5.0, "top_p": 0.9},
    ],
    ids=str,
)
def test_the_short_cut_draws_what_the_whole_sort_draws(changes, monkeypatch):
    num_rows = 200
    logits = random_logits(num_rows, 300).round(decimals=1)
    uniforms = torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    filters = make_filters(num_rows, **changes)
    monkeypatch.setattr(subject, "CANDIDATES", ())
    whole, _ = draw(logits, filters, uniforms)
    monkeypatch.setattr(subject, "CANDIDATES", (8, 64))
    short, _ = draw(logits, filters, uniforms)
    assert short.tolist() == whole.tolist()


def test_the_short_cut_is_taken_where_it_can_be():
    logits = random_logits(1, 300)
    values = (logits - logits.amax()).sort(descending=True).values
    total = values.exp().sum(-1)
    few = values[:, :64]
    assert suffices(few, total, make_filters(1, top_p=0.5)).all()
    assert suffices(few, total, make_filters(1, top_k=10)).all()
    assert suffices(few, total, make_filters(1, min_p=0.5)).all()
    assert not suffices(few, total, make_filters(1, top_k=65)).any()
    assert not suffices(few, total, make_filters(1, top_p=1.0)).any()


def test_the_smallest_and_largest_number_draw_the_first_and_last_kept_token():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0, -torch.inf]]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    for filters in (make_filters(2), make_filters(2, top_k=3)):
        tokens, is_sound = draw(logits, filters, uniforms)
        assert tokens.tolist() == [0, 3]
        assert is_sound.all()
