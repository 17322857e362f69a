"""How CPU threads wait for each other; to be decided before torch is imported. Imports no torch."""

from __future__ import annotations

import os
import sys

# Rounds that a thread of torch's OpenMP (libgomp) spins before it sleeps. The default, when there
# are as many threads as cores, is to spin practically for ever: if another process takes a core,
# each of a step's 250 parallel regions then waits for a scheduler's time slice. The demo's shape,
# two Zen 5 cores, 2026-12-01, ms a decode step of one row, idle machine / machine with a load of 5:
# default 24 / 360 and more, 20000 rounds 24 / 30, 1000 rounds 30 / 115, no spinning 33 / 76.
SPIN_ROUNDS = 20000


def limit_spinning() -> bool:
    """Set the limit unless the environment has one; False if torch is loaded, so it is too late."""
    if "torch" in sys.modules:
        return False
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
    return True
