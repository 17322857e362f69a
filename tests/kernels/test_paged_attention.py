"""The paged attention kernel against its reference, and the reference against the definition."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import reference_attention as reference
from tests.kernels.attention_cases import TOLERANCES, make_batch

SEGMENTS = {
    "one token, the first of its row": [(0, 1)],
    "one decode row": [(37, 1)],
    "decode rows, one long and others short": [(70, 1), (0, 1), (1, 1), (16, 1), (31, 1)],
    "a small extend": [(9, 5)],
    "extends that straddle tiles, and decode rows": [(3, 5), (0, 7), (20, 1), (33, 1), (2, 9)],
    "many decode rows": [(n % 7, 1) for n in range(17)],
}


def check(batch, *, num_splits=None, **how):
    from freetoken.kernels import triton_attention as subject

    how = {"scaling": 0.3, **how}
    expected = reference.paged_attention(*batch.arguments(), **how)
    got = subject.paged_attention(*batch.arguments(), num_splits=num_splits, **how)
    assert got.dtype == batch.query.dtype
    torch.testing.assert_close(got, expected, **TOLERANCES[batch.query.dtype])


def test_the_reference_is_the_definition():
    batch = make_batch([(5, 3), (8, 1)], padding=2, device=torch.device("cpu"), dtype=torch.float64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = reference.paged_attention(
        *batch.arguments(), scaling=0.25, window=4, softcap=3.0, sinks=sinks
    )
    assert torch.equal(out[4:], torch.zeros(2, 4, 16))
    for token in range(4):
        row, position = int(batch.rows[token]), int(batch.positions[token])
        for head in range(4):
            weights, values = [sinks[head].exp()], [torch.zeros(16)]
            for at in range(max(0, position - 3), position + 1):
                page, place = int(batch.page_table[row, at // 4]), at % 4
                key = batch.k_pool[page, place, head // 2]
                score = torch.tanh(batch.query[token, head] @ key * 0.25 / 3.0) * 3.0
                weights.append(score.exp())
                values.append(batch.v_pool[page, place, head // 2])
            expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            torch.testing.assert_close(out[token, head].float(), expected.float())


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_batches(segments, kernel_dtype, device):
    check(make_batch(segments, device=device, dtype=kernel_dtype))


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_batches_in_shares(segments, device):
    check(make_batch(segments, device=device, dtype=torch.float32), num_splits=4)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
def test_page_sizes(page_size, device):
    batch = make_batch([(40, 3), (11, 1)], page_size=page_size, device=device, dtype=torch.float32)
    check(batch, num_splits=2)


@pytest.mark.parametrize(
    ("window", "num_splits"), [(1, 4), (2, 1), (7, 4), (7, 1), (16, 1), (500, 4)]
)
def test_windows(window, num_splits, device):
    batch = make_batch([(40, 3), (3, 1), (60, 1)], device=device, dtype=torch.float32)
    check(batch, num_splits=num_splits, window=window)


@pytest.mark.parametrize(
    ("segments", "padding", "num_splits"),
    [
        ([(12, 1)], 1, 1),
        ([(12, 1)], 17, 4),
        ([(5, 3), (60, 1)], 1, 4),
        ([(5, 3), (60, 1)], 17, 1),
    ],
)
def test_padding_reads_nothing_and_gives_zeros(segments, padding, num_splits, device):
    check(
        make_batch(segments, padding=padding, device=device, dtype=torch.float32),
        num_splits=num_splits,
    )


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("how", [{"softcap": 1.5}, {"window": 5}, {}], ids=str)
def test_sinks_and_softcap(how, num_splits, kernel_dtype, device):
    batch = make_batch([(40, 2), (0, 1)], device=device, dtype=kernel_dtype, padding=1)
    sinks = torch.tensor([1.0, -2.0, 0.0, 3.0], device=device, dtype=kernel_dtype)
    check(batch, num_splits=num_splits, sinks=sinks, **how)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 1, "kv_heads": 1},
        {"heads": 3, "kv_heads": 3},
        {"heads": 8, "kv_heads": 1},
        {"heads": 6, "kv_heads": 2},
        {"heads": 40, "kv_heads": 1},
        {"heads": 72, "kv_heads": 1},
        {"k_size": 80, "v_size": 80},
        {"k_size": 96, "v_size": 64},
        {"k_size": 24, "v_size": 12},
        {"k_size": 256, "v_size": 256},
    ],
    ids=str,
)
@pytest.mark.parametrize(("num_splits", "segments"), [(2, [(20, 1)]), (1, [(6, 9), (30, 9)])])
def test_heads_and_sizes(shape, num_splits, segments, device):
    batch = make_batch(segments, device=device, dtype=torch.float32, **shape)
    check(batch, num_splits=num_splits)


def test_the_number_of_shares_depends_on_shapes_alone():
    from freetoken.kernels.triton_attention import _choose_splits

    device = torch.device("cpu")  # counts as 8 multiprocessors
    assert [_choose_splits(n, 1000, device) for n in (1, 2, 3, 8, 9, 500)] == [16, 8, 4, 2, 1, 1]
    assert [_choose_splits(1, steps, device) for steps in (1, 2, 3, 9)] == [1, 2, 4, 16]


def test_an_empty_batch(device):
    from freetoken.kernels import triton_attention as subject

    batch = make_batch([(3, 1)], device=device, dtype=torch.float32)
    query, k_pool, v_pool, page_table, rows, positions, _ = batch.arguments()
    out = subject.paged_attention(
        query[:0], k_pool, v_pool, page_table, rows[:0], positions[:0], None, scaling=1.0
    )
    assert out.shape == (0, 4, 16)


class Launches:
    """Stands for a kernel and notes the constants that it would be compiled for."""

    def __init__(self):
        self.constants = set()

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.constants.add(tuple(constants.items()))


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (8, 8), (16, 1)])
def test_few_kernels_serve_all_numbers_of_tokens(heads, kv_heads, device, monkeypatch):
    """Each is compiled when its first graph is captured, which takes about a second."""
    from freetoken.kernels import triton_attention as subject

    share, join = Launches(), Launches()
    monkeypatch.setattr(subject, "share_kernel", share)
    monkeypatch.setattr(subject, "join_kernel", join)
    monkeypatch.setattr(subject, "_num_multiprocessors", lambda device: 132)
    pool = torch.zeros(3, 16, kv_heads, 64, dtype=torch.bfloat16, device=device)
    table = torch.zeros(4, 2048, dtype=torch.int32, device=device)
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        query = torch.zeros(num_tokens, heads, 64, dtype=torch.bfloat16, device=device)
        places = torch.zeros(2, num_tokens, dtype=torch.int64, device=device)
        subject.paged_attention(query, pool, pool, table, *places, None, scaling=1.0)
    assert len(share.constants) <= 3
    assert len(join.constants) <= 2
