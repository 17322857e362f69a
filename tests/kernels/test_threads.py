from __future__ import annotations

import os
import subprocess
import sys

BEFORE = """
import os, sys
from freetoken.kernels.threads import limit_spinning
done = limit_spinning()
assert "torch" not in sys.modules
print(done, os.environ.get("GOMP_SPINCOUNT"))
"""
AFTER = """
import torch
print(limit_spinning())
"""


def run(script: str, **environment: str) -> list[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_WAIT"))}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


def test_spinning_is_limited_only_before_torch_is_loaded() -> None:
    assert run(BEFORE + AFTER) == ["True", "20000", "False"]


def test_what_the_user_set_is_kept() -> None:
    assert run(BEFORE, GOMP_SPINCOUNT="7") == ["True", "7"]
    assert run(BEFORE, OMP_WAIT_POLICY="passive") == ["True", "None"]
