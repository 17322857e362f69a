"""Build a directory once: complete or absent, whoever asks and however often.

Knows nothing about models. One lock file per cache directory serialises builders across processes;
a build happens in a directory beside its target and is renamed when complete, so a killed build
leaves only a `.building-*` directory that the next builder removes.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from freetoken.errors import ConfigError

Report = Callable[[str], None]

MANIFEST = "manifest.json"
_BUILDING = ".building-"


def is_complete(final: Path) -> bool:
    """True if `final` has its manifest and every file in it has the size noted there."""
    try:
        manifest = json.loads((final / MANIFEST).read_text())
        return all((final / name).stat().st_size == size for name, size in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def build_once(
    final: Path,
    build: Callable[[Path], None],
    *,
    needs: Mapping[str, int],
    report: Report,
    force: bool = False,
    free_bytes: Callable[[Path], int] | None = None,
) -> bool:
    """Make `final` by calling `build` on an empty directory, unless it is there and complete.

    needs: bytes on disk by purpose, checked before `build` starts. force: build even so; the old
    directory is replaced only when the new one is complete. Returns whether it was built.
    """
    if not force and is_complete(final):
        return False
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / ".lock", report):
            if not force and is_complete(final):
                return False
            _remove_stale(final.parent)
            _check_space(final.parent, needs, free_bytes or _free_bytes)
            _build_and_rename(final, build)
    except OSError as error:
        raise ConfigError(
            f"cannot build {final}: {error}; XDG_CACHE_HOME chooses another cache directory"
        ) from error
    return True


def show_bytes(count: int) -> str:
    """`1.38 GB`, `92.9 MB`: decimal units, three digits."""
    unit, size = ("GB", count / 1e9) if count >= 1e9 else ("MB", count / 1e6)
    return f"{size:.3g} {unit}"


def _build_and_rename(final: Path, build: Callable[[Path], None]) -> None:
    building = final.parent / f"{_BUILDING}{os.getpid()}-{secrets.token_hex(4)}"
    building.mkdir(mode=0o755)
    try:
        build(building)
        files = {
            str(path.relative_to(building)): path.stat().st_size
            for path in sorted(building.rglob("*"))
            if path.is_file()
        }
        (building / MANIFEST).write_text(json.dumps(files, indent=1) + "\n")
        if final.exists():
            final.rename(building.with_name(f"{building.name}-old"))
        building.rename(final)
    finally:
        _remove_stale(final.parent)


def _remove_stale(parent: Path) -> None:
    """Under the lock nobody else builds here, so whatever is marked as building is left over."""
    for path in parent.glob(f"{_BUILDING}*"):
        shutil.rmtree(path)


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    with path.open("a") as file:  # the lock ends with the process, however it dies
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process builds in {path.parent}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _check_space(
    directory: Path, needs: Mapping[str, int], free_bytes: Callable[[Path], int]
) -> None:
    need, free = sum(needs.values()), free_bytes(directory)
    if need <= free:
        return
    parts = " + ".join(f"{purpose} {show_bytes(size)}" for purpose, size in needs.items())
    raise ConfigError(
        f"{directory} needs {show_bytes(need)} of disk space ({parts}), {show_bytes(free)} are "
        f"free; free {show_bytes(need - free)} or let XDG_CACHE_HOME name a larger disk"
    )
