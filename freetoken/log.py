"""Logging: set up once per process, one line per event, `event key=value`.

Every process calls `setup(name, level)` first thing. Other modules do `log = get(__name__)` and
`log.info(event("request.refused", id=rid, tokens=8760, limit=8208))`. Prompts and outputs never
appear above DEBUG.
"""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname).1s %(ftname)s %(message)s"


class _Named(logging.Filter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._ftname = name

    def filter(self, record: logging.LogRecord) -> bool:
        record.ftname = self._ftname
        return True


def setup(name: str, level: str = "INFO") -> None:
    """Send this process's records to stderr, marked with `name` (its process title)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(_Named(name))
    root = logging.getLogger("freetoken")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def get(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def event(name: str, **fields: object) -> str:
    """`name key=value …`; floats in four significant digits. Text with blanks or control
    characters is quoted, so that a line stays a line whatever a peer has sent."""
    return " ".join([name, *(f"{key}={_show(value)}" for key, value in fields.items())])


class Journal:
    """Lines of a logger that are only noted, until `write`: for a loop that must not wait while a
    line is made and written."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lines: list[tuple[str, dict[str, object]]] = []

    def info(self, name: str, **fields: object) -> None:
        """As `logger.info(event(…))`; the values must not change any more."""
        if self._logger.isEnabledFor(logging.INFO):
            self._lines.append((name, fields))

    def write(self) -> None:
        lines, self._lines = self._lines, []
        for name, fields in lines:
            self._logger.info(event(name, **fields))


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text or not text or not text.isprintable() else text
