"""once.py: a directory is complete or absent, whoever asks."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from freetoken.demo.once import MANIFEST, build_once, is_complete, show_bytes
from freetoken.errors import ConfigError

NEEDS = {"checkpoint": 3_000_000, "download": 1_000_000}


def write_two_files(directory: Path) -> None:
    (directory / "inner").mkdir()
    (directory / "inner" / "weights").write_bytes(b"w" * 100)
    (directory / "config").write_text("{}")


def never(directory: Path) -> None:
    raise AssertionError(f"built again in {directory}")


def ignore(line: str) -> None:
    pass


def test_a_complete_directory_is_not_built_again(tmp_path: Path) -> None:
    final = tmp_path / "cache" / "model"
    assert build_once(final, write_two_files, needs=NEEDS, report=ignore)
    assert is_complete(final)
    assert not build_once(final, never, needs=NEEDS, report=ignore)


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest gone", "manifest broken"])
def test_a_damaged_directory_is_built_anew(tmp_path: Path, damage: str) -> None:
    final = tmp_path / "model"
    build_once(final, write_two_files, needs=NEEDS, report=ignore)
    weights = final / "inner" / "weights"
    match damage:
        case "truncated":
            weights.write_bytes(b"w" * 99)
        case "missing":
            weights.unlink()
        case "manifest gone":
            (final / MANIFEST).unlink()
        case "manifest broken":
            (final / MANIFEST).write_text("[1")
    assert not is_complete(final)
    assert build_once(final, write_two_files, needs=NEEDS, report=ignore)
    assert weights.read_bytes() == b"w" * 100


def test_force_builds_a_complete_directory_anew(tmp_path: Path) -> None:
    final = tmp_path / "model"
    build_once(final, write_two_files, needs=NEEDS, report=ignore)
    (final / "config").write_text("[]")
    assert build_once(final, write_two_files, needs=NEEDS, report=ignore, force=True)
    assert (final / "config").read_text() == "{}"


def test_a_failed_build_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    final = tmp_path / "model"
    build_once(final, write_two_files, needs=NEEDS, report=ignore)

    def fail(directory: Path) -> None:
        (directory / "half").write_text("…")
        raise ConfigError("no wheel")

    with pytest.raises(ConfigError, match="no wheel"):
        build_once(final, fail, needs=NEEDS, report=ignore, force=True)
    assert is_complete(final)
    assert sorted(os.listdir(tmp_path)) == [".lock", "model"]


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".building-1-abc"
    stale.mkdir()
    (stale / "half").write_text("…")
    build_once(tmp_path / "model", write_two_files, needs=NEEDS, report=ignore)
    assert sorted(os.listdir(tmp_path)) == [".lock", "model"]


def test_too_little_disk_space_is_refused_before_building_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        build_once(
            tmp_path / "model", never, needs=NEEDS, report=ignore, free_bytes=lambda _: 3_500_000
        )
    message = str(raised.value)
    assert "needs 4 MB of disk space (checkpoint 3 MB + download 1 MB)" in message
    assert "3.5 MB are free; free 0.5 MB or let XDG_CACHE_HOME" in message


def test_a_cache_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        build_once(tmp_path / "file" / "model", never, needs=NEEDS, report=ignore)


def _build_in_a_process(final: Path, number: int, log: Path, gate: Path) -> None:
    """Builds while holding the gate open until the other process has said that it waits."""

    def build(directory: Path) -> None:
        with log.open("a") as file:
            file.write(f"build {number}\n")
        fifo = os.open(gate, os.O_RDONLY)  # blocks until the waiting process opens the other end
        os.close(fifo)
        write_two_files(directory)

    def report(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")
        os.close(os.open(gate, os.O_WRONLY))

    built = build_once(final, build, needs=NEEDS, report=report)
    with log.open("a") as file:
        file.write(f"built={built}\n")


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    final, log, gate = tmp_path / "cache" / "model", tmp_path / "log", tmp_path / "gate"
    os.mkfifo(gate)
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_build_in_a_process, args=(final, number, log, gate))
        for number in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    lines = log.read_text().splitlines()
    assert sorted(lines[-2:]) == ["built=False", "built=True"]
    assert sum(line.startswith("build ") for line in lines) == 1
    assert sum("waiting for it" in line for line in lines) == 1
    assert is_complete(final)


@pytest.mark.parametrize(
    ("count", "text"), [(1_380_000_000, "1.38 GB"), (92_871_040, "92.9 MB"), (0, "0 MB")]
)
def test_bytes_are_shown_in_decimal_units(count: int, text: str) -> None:
    assert show_bytes(count) == text
