from __future__ import annotations

import torch

from freetoken.experts.bank import RowBank
from freetoken.experts.layout import ExpertLayout
from freetoken.experts.staging import RowCopier, copy_rows, merge_runs


def test_rows_that_follow_each_other_on_both_sides_are_one_run() -> None:
    moves = [(0, 4), (1, 5), (2, 6), (4, 7), (5, 9), (6, 10), (3, 11)]
    assert merge_runs(moves) == [(0, 4, 3), (4, 7, 1), (5, 9, 2), (3, 11, 1)]
    assert merge_runs([]) == []


def test_rows_arrive_where_they_belong() -> None:
    layout = ExpertLayout.plan({"up_proj": (4, 8), "down_proj": (8, 4)}, torch.float32)
    bank = RowBank(layout, 6)
    bank.rows.copy_(torch.randint(0, 256, bank.rows.shape, dtype=torch.uint8))
    rows = torch.zeros(9, layout.row_bytes, dtype=torch.uint8)
    moves = [(0, 3), (1, 4), (5, 0)]
    RowCopier(rows.device).copy(bank, rows, moves)
    for expert, row in moves:
        assert torch.equal(rows[row], bank.rows[expert])
    assert int(rows.count_nonzero(1).count_nonzero()) == len(moves)
    other = torch.zeros_like(rows)
    copy_rows(bank.rows, other, moves)
    assert torch.equal(rows, other)
