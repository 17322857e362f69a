import re
import socket
from pathlib import Path
from typing import Literal

import pytest

from freetoken import log
from freetoken.commands import host
from freetoken.config import Config
from freetoken.errors import ConfigError


def test_a_busy_port_is_refused_by_its_number() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: it is in use"):
            host.reserve_port("127.0.0.1", port)
    assert host.reserve_port("127.0.0.1", port) == port


def test_port_0_becomes_a_free_one() -> None:
    assert host.reserve_port("127.0.0.1", 0) > 0
    assert host.reserve_port("localhost", 0) > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [("192.0.2.1", "cannot listen on 192.0.2.1:0"), ("no such", "--host no such is no address")],
)
def test_a_host_that_is_not_ours_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        host.reserve_port(name, 0)


def test_loopback_is_told_from_what_others_reach() -> None:
    assert all(host.is_loopback(name) for name in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(host.is_loopback(name) for name in ("0.0.0.0", "::", "192.0.2.1", "no such"))


def test_memory_that_is_too_small_is_refused_with_both_numbers() -> None:
    host.check_memory(10, 10, with_gpu=False)
    with pytest.raises(ConfigError, match=r"need 3\.00 GiB .* 1\.50 GiB are available"):
        host.check_memory(3 * host.GIB, 3 * host.GIB // 2, with_gpu=False)


def test_with_a_gpu_only_the_plan_knows_how_much_lies_in_host_memory() -> None:
    host.check_memory(11, 10, with_gpu=True)


@pytest.mark.parametrize(
    ("device", "has_driver", "expected"),
    [("auto", True, True), ("cuda", True, True), ("cpu", True, False), ("auto", False, False)],
)
def test_a_gpu_may_be_used_where_its_driver_is(
    device: Literal["auto", "cpu", "cuda"],
    has_driver: bool,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(host, "GPU_FILES", (driver,))
    assert host.may_use_gpu(Config(device=device)) == expected


def test_only_an_open_server_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("test")
    host.warn_if_open(Config())
    host.warn_if_open(Config(host="0.0.0.0", api_key="k"))
    assert capsys.readouterr().err == ""
    host.warn_if_open(Config(host="0.0.0.0"))
    assert "serve.open host=0.0.0.0" in capsys.readouterr().err
