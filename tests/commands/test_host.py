import re
import socket
from pathlib import Path

import pytest

from freetoken.commands import host
from freetoken.errors import ConfigError

MIB = 1 << 20


def test_a_busy_port_is_refused_by_its_number() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            host.reserve_port("127.0.0.1", port)
    assert host.reserve_port("127.0.0.1", port) == port


def test_port_0_becomes_a_free_one() -> None:
    assert host.reserve_port("127.0.0.1", 0) > 0
    assert host.reserve_port("localhost", 0) > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [("192.0.2.1", "192.0.2.1 is no address of this machine"), ("no such", "no such is no addr")],
)
def test_a_host_that_is_not_ours_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        host.reserve_port(name, 0)


def test_loopback_is_told_from_what_others_reach() -> None:
    assert all(host.is_loopback(name) for name in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(host.is_loopback(name) for name in ("0.0.0.0", "::", "192.0.2.1", "no such"))


def test_memory_that_is_too_small_is_refused_with_both_numbers() -> None:
    host.check_memory(10, 10)
    with pytest.raises(ConfigError, match=r"need 3\.00 GiB .* 1\.50 GiB are available"):
        host.check_memory(3 * host.GIB, 3 * host.GIB // 2)


def write_v2(root: Path, group: str, limit: str, used: int, cached: int) -> None:
    directory = root / "sys/fs/cgroup" / group
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nfile 9\n")


def read(root: Path, group: str) -> int:
    proc = root / "proc/self/cgroup"
    proc.parent.mkdir(parents=True, exist_ok=True)
    proc.write_text(group)
    return host.read_available_bytes(root, lambda: 1000 * MIB)


def test_the_tightest_cgroup_above_us_counts_without_its_page_cache(tmp_path: Path) -> None:
    write_v2(tmp_path, "a", str(400 * MIB), used=300 * MIB, cached=100 * MIB)
    write_v2(tmp_path, "a/b", "max", used=1, cached=0)
    assert read(tmp_path, "0::/a/b\n") == 200 * MIB


def test_inside_a_container_the_limit_stands_at_the_top(tmp_path: Path) -> None:
    write_v2(tmp_path, ".", str(500 * MIB), used=100 * MIB, cached=0)
    assert read(tmp_path, "0::/host/path/that/is/not/here\n") == 400 * MIB


def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path) -> None:
    directory = tmp_path / "sys/fs/cgroup/memory/docker/x"
    directory.mkdir(parents=True)
    (directory / "memory.limit_in_bytes").write_text(f"{300 * MIB}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{400 * MIB}\n")
    (directory / "memory.stat").write_text(f"total_inactive_file {50 * MIB}\n")
    assert read(tmp_path, "5:cpu,memory:/docker/x\n3:cpuset:/\n") == 0
    assert read(tmp_path, "3:cpuset:/\n") == 1000 * MIB


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert host.read_available_bytes(tmp_path, lambda: 7) == 7
    assert host.read_available_bytes() > MIB
