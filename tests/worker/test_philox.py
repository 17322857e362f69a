"""The random stream: Random123's vectors, uniformity, independence of everything else."""

import numpy as np
import pytest

from freetoken.worker.philox import philox, uniforms

# From Random123's kat_vectors, "philox4x32 10": counter, key, result.
VECTORS = [
    (
        (0x00000000,) * 4,
        (0x00000000,) * 2,
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_known_answers(counter, key, expected):
    def words(values):
        return tuple(np.array([value], np.uint64) for value in values)

    assert tuple(int(word[0]) for word in philox(words(counter), words(key))) == expected


def test_a_number_depends_on_its_seed_and_position_alone():
    seeds = np.array([1, 2, 1, 2**63 - 1], np.uint64)
    positions = np.array([0, 0, 5, 2**40], np.uint64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_fill_the_unit_interval_evenly():
    n = 100_000
    numbers = uniforms(np.full(n, 42, np.uint64), np.arange(n, dtype=np.uint64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    chi_square = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5  # five deviations above the mean
