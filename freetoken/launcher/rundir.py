"""Run directories: private, short, locked by who serves from them, swept when nobody does.

A launcher makes a fresh one and removes it at its end; processes that are started one by one meet
in a fixed one. A lock (flock(2)) tells a live directory from what a killed launcher left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from freetoken.errors import ConfigError
from freetoken.wire.keeping import SOCKET_NAME
from freetoken.wire.sockets import Endpoints, make_run_dir

PREFIX = "freetoken-"
CONFIG = "config.toml"
LAUNCHER_LOCK = "launcher.lock"
SWEEP_AGE_S = 60.0
"""A younger directory without a held lock may be one that is being made."""


def base_dir() -> Path:
    """`$XDG_RUNTIME_DIR` if it is ours to write, else /tmp; both are short."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        return Path(runtime)
    return Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())


def shared_dir() -> Path:
    """Where processes that are started one by one meet, unless --run-dir says otherwise."""
    base = base_dir()
    return base / ("freetoken" if base != Path("/tmp") else f"{PREFIX}{os.getuid()}")


@contextlib.contextmanager
def launcher_dir(configured: Path | None) -> Iterator[Path]:
    """The launcher's directory, locked; what it holds of ours is removed at the end."""
    if configured is None:
        sweep(base_dir())
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getuid()}-", dir=base_dir()))
    else:
        path = prepare(configured)
    try:
        with lock(path, LAUNCHER_LOCK, "server"):
            try:
                yield path
            finally:
                _remove_contents(path)
    finally:
        if configured is None:
            shutil.rmtree(path, ignore_errors=True)


def prepare(path: Path) -> Path:
    """The directory for one process started by itself."""
    path = path.absolute()
    Endpoints.in_directory(path)  # refuses a path too long for a socket
    return _make(path)


def _make(path: Path) -> Path:
    try:
        return make_run_dir(path)
    except OSError as error:
        raise ConfigError(f"cannot make run directory {path}: {error.strerror}") from error


@contextlib.contextmanager
def lock(directory: Path, name: str, holder: str) -> Iterator[None]:
    """Hold `directory/name` against other processes; ConfigError names who holds it."""
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"run directory {directory} is in use by another {holder} (pid {pid}); "
                "give another --run-dir"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """A new file that only we may read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _remove_contents(path: Path) -> None:
    for file in (
        *Endpoints.in_directory(path).paths(),
        *(path / name for name in (CONFIG, SOCKET_NAME, LAUNCHER_LOCK)),
    ):
        file.unlink(missing_ok=True)


def sweep(base: Path) -> None:
    """Remove directories of launchers that were killed."""
    for path in base.glob(f"{PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            info = path.stat()
            if info.st_uid != os.getuid() or time.time() - info.st_mtime < SWEEP_AGE_S:
                continue
            with contextlib.suppress(ConfigError), lock(path, LAUNCHER_LOCK, "server"):
                shutil.rmtree(path, ignore_errors=True)
