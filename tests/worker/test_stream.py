"""Numbers computed ahead are those of the stream."""

from __future__ import annotations

import numpy as np

from freetoken.worker.philox import uniforms
from freetoken.worker.stream import AHEAD, UniformStream


def expected(seeds, positions):
    return uniforms(np.array(seeds, np.uint64), np.array(positions, np.uint64))


def test_numbers_equal_philox_at_any_position_and_in_any_order():
    stream, rows = UniformStream(3), np.arange(3)
    seeds = [5, 2**40 + 1, 2**63 - 1]
    for row, seed in enumerate(seeds):
        stream.start(row, seed)
    for step in [*range(AHEAD + 3), 1000, 3, 2**33]:
        positions = step + 7 * rows
        assert (stream.read(rows, positions) == expected(seeds, positions)).all()
    backwards = np.array([2, 0])
    assert (
        stream.read(backwards, np.array([8, 9])) == expected([seeds[2], seeds[0]], [8, 9])
    ).all()


def test_a_row_that_starts_again_has_the_numbers_of_its_new_seed():
    stream, rows, positions = UniformStream(1), np.array([0]), np.array([4])
    for seed in (1, 2):
        stream.start(0, seed)
        assert (stream.read(rows, positions) == expected([seed], [4])).all()
