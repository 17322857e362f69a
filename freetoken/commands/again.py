"""How to start `ft` once more: by the same interpreter, from the same sources."""

from __future__ import annotations

import sys
from pathlib import Path


def ft_command(*arguments: str) -> tuple[str, ...]:
    """The command line of `ft arguments`."""
    # without -P the working directory could shadow modules; keep it if we were started from there
    safe = () if Path(__file__).resolve().parents[2] == Path.cwd() else ("-P",)
    return (sys.executable, *safe, "-m", "freetoken.cli", *arguments)
