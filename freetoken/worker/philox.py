"""Philox4x32-10: a uniform number for (seed, output position), and for nothing else.

Counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), so a row's
stream does not depend on the batch it runs in, on restarts or on preemptions. Constants and test
vectors are Random123's. Computed on the host: both inputs are known there before the forward ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = npt.NDArray[np.uint64]
"""32-bit words, each in a uint64 so that a product of two keeps its high half."""


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter and key; all arrays have one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Words, positions: Words) -> npt.NDArray[np.float64]:
    """[n] in [0, 1) with 52 random bits: `u * total < total` then holds in float64 too."""
    zero = np.zeros_like(positions)
    words = philox(
        (positions & _LOW, positions >> _HALF, zero, zero), (seeds & _LOW, seeds >> _HALF)
    )
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return bits.astype(np.float64) * 2.0**-52
