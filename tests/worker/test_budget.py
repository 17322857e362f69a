"""Free memory of the machine and of the control groups around us."""

from __future__ import annotations

import psutil
import pytest

from freetoken.worker.budget import (
    GPU_CONTEXT_BYTES,
    MIN_GPU_MARGIN_BYTES,
    MIN_MARGIN_BYTES,
    budget_of,
    card_budget_of,
    cgroup_free,
    gpu_budget_of,
    measure_budget,
)

MIB = 1 << 20


def write_group(directory, limit, use, droppable=0, *, version=2):
    directory.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{use}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{names[2]} {droppable}\nfile 7\n")


@pytest.fixture
def own(tmp_path):
    def write(text):
        path = tmp_path / "self"
        path.write_text(text)
        return path

    return write


def test_no_limit_is_no_limit(tmp_path, own):
    write_group(tmp_path / "cg", "max", 100)
    assert cgroup_free(tmp_path / "cg", own("0::/\n")) is None
    assert cgroup_free(tmp_path / "missing", own("0::/\n")) is None
    assert cgroup_free(tmp_path / "cg", tmp_path / "not there") is None


def test_the_limit_less_use_counts_and_droppable_pages_are_no_use(tmp_path, own):
    write_group(tmp_path / "cg", 1000, 600, 200)
    assert cgroup_free(tmp_path / "cg", own("0::/\n")) == 600


def test_the_tightest_ancestor_counts(tmp_path, own):
    write_group(tmp_path / "cg", "max", 0)
    write_group(tmp_path / "cg/a", 500, 100)
    write_group(tmp_path / "cg/a/b", 1000, 100)
    assert cgroup_free(tmp_path / "cg", own("0::/a/b\n")) == 400


def test_a_path_of_the_host_falls_back_to_the_root(tmp_path, own):
    write_group(tmp_path / "cg", 1000, 100)
    assert cgroup_free(tmp_path / "cg", own("0::/docker/0123\n")) == 900


def test_version_one_is_understood(tmp_path, own):
    write_group(tmp_path / "cg/memory/x", 1000, 100, 50, version=1)
    assert cgroup_free(tmp_path / "cg", own("5:cpu,cpuacct:/x\n4:memory:/x\n")) == 950


def test_a_margin_is_left():
    assert budget_of(100 * MIB) == 0
    assert budget_of(1000 * MIB) == 1000 * MIB - MIN_MARGIN_BYTES
    assert budget_of(100_000 * MIB) == 95_000 * MIB


def test_a_gpu_keeps_a_margin_and_a_card_its_context_too():
    assert gpu_budget_of(100 * MIB) == 0
    assert gpu_budget_of(1000 * MIB) == 1000 * MIB - MIN_GPU_MARGIN_BYTES
    assert gpu_budget_of(100_000 * MIB) == 98_000 * MIB
    assert card_budget_of(24_000 * MIB) == gpu_budget_of(24_000 * MIB - GPU_CONTEXT_BYTES)
    assert card_budget_of(1) == 0


def test_the_budget_of_this_machine_is_below_its_free_memory():
    assert 0 <= measure_budget() < psutil.virtual_memory().total
