from __future__ import annotations

import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from freetoken.errors import ConfigError
from freetoken.wire.messages import Abort
from freetoken.wire.sockets import (
    HIGH_WATER_MARK,
    MAX_SOCKET_PATH_BYTES,
    CurveKeys,
    Dealer,
    Endpoints,
    Router,
    bind_router,
    connect_dealer,
    make_run_dir,
)


class Net:
    """A context whose sockets are closed at the end, not when the last name is gone."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def bind(self, endpoint: str, keys: CurveKeys | None = None) -> Router:
        self._sockets.append(bind_router(self.context, endpoint, keys))
        return Router(self._sockets[-1])

    def connect(self, endpoint: str, name: str, keys: CurveKeys | None = None) -> Dealer:
        self._sockets.append(connect_dealer(self.context, endpoint, name, keys))
        return Dealer(self._sockets[-1])

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(0)
        self.context.term()


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    yield made
    made.close()


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ft-") as path:
        yield f"ipc://{path}/s"


def wait(router: Router) -> tuple[bytes, object]:
    assert router.socket.poll(5000)
    received = router.receive()
    assert received is not None
    return received


def test_a_run_directory_is_private(tmp_path: Path) -> None:
    path = make_run_dir(tmp_path / "a" / "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    assert stat.S_IMODE(make_run_dir(path).stat().st_mode) == 0o700


def test_a_directory_in_use_that_others_may_enter_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0755\) and not empty; .* another --run-dir"):
        make_run_dir(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_socket_path_beyond_the_limit_is_refused_with_its_length(tmp_path: Path) -> None:
    name = "d" * (MAX_SOCKET_PATH_BYTES - len(str(tmp_path)) - len("//worker.sock"))
    fitting = Endpoints.in_directory(tmp_path / name)
    assert max(len(str(path)) for path in fitting.paths()) == MAX_SOCKET_PATH_BYTES
    with pytest.raises(ConfigError, match=r"108 bytes, the system's limit is 107.*--run-dir"):
        Endpoints.in_directory(tmp_path / (name + "d"))


def test_the_longest_path_that_is_accepted_can_be_bound(net: Net) -> None:
    with tempfile.TemporaryDirectory(prefix="ft-") as short:
        name = "d" * (MAX_SOCKET_PATH_BYTES - len(short) - len("//worker.sock"))
        endpoints = Endpoints.in_directory(make_run_dir(Path(short) / name))
        net.bind(endpoints.worker)


def test_an_endpoint_that_cannot_be_bound_is_named(net: Net) -> None:
    with pytest.raises(ConfigError, match="cannot listen on ipc:///no/such/dir/s"):
        net.bind("ipc:///no/such/dir/s")


def test_messages_go_both_ways_and_start_order_does_not_matter(net: Net, endpoint: str) -> None:
    dealer = net.connect(endpoint, "peer")
    dealer.send(Abort("early"))
    router = net.bind(endpoint)
    assert wait(router) == (b"peer", Abort("early"))
    assert router.receive() is None
    assert router.send(b"peer", Abort("back"))
    assert dealer.receive(5000) == Abort("back")
    assert dealer.receive(0) is None


def test_a_send_to_nobody_is_refused(net: Net, endpoint: str) -> None:
    assert not net.bind(endpoint).send(b"nobody", Abort("x"))


def test_a_send_to_a_full_queue_is_refused_and_blocks_nobody(net: Net, endpoint: str) -> None:
    router = net.bind(endpoint)
    deaf, keen = (net.connect(endpoint, name) for name in ("deaf", "keen"))
    for dealer in (deaf, keen):
        dealer.send(Abort("hello"))
        wait(router)
    big = Abort("x" * 2000)
    sent = 0
    while router.send(b"deaf", big):
        sent += 1
        assert sent < 4 * HIGH_WATER_MARK, "the queue has no end"
    assert sent >= HIGH_WATER_MARK
    assert router.send(b"keen", Abort("still here"))
    assert keen.receive(5000) == Abort("still here")


def test_malformed_frames_are_counted_and_skipped(net: Net, endpoint: str) -> None:
    router = net.bind(endpoint)
    dealer = net.connect(endpoint, "peer")
    dealer.socket.send(b"\xc1")
    dealer.socket.send_multipart([b"a", b"b"])
    dealer.send(Abort("good"))
    assert wait(router) == (b"peer", Abort("good"))
    assert router.num_malformed == 2


def test_a_dealer_counts_and_skips_them_too(net: Net, endpoint: str) -> None:
    router = net.bind(endpoint)
    dealer = net.connect(endpoint, "peer")
    dealer.send(Abort("hello"))
    wait(router)
    router.socket.send_multipart([b"peer", b"\xc1"])
    router.socket.send_multipart([b"peer", b"a", b"b"])
    assert router.send(b"peer", Abort("good"))
    assert dealer.receive(5000) == Abort("good")
    assert dealer.num_malformed == 2


def test_tcp_without_keys_is_refused(net: Net) -> None:
    with pytest.raises(ConfigError, match="CURVE keys"):
        net.bind("tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="CURVE keys"):
        net.connect("tcp://127.0.0.1:1", "peer")


@pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq has no CURVE")
def test_tcp_with_keys_lets_in_who_has_them(net: Net) -> None:
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    keys = CurveKeys(server[0], server[1], client[0], client[1])
    router = net.bind("tcp://127.0.0.1:*", keys)
    endpoint = router.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    dealer = net.connect(endpoint, secrets.token_hex(4), keys)
    dealer.send(Abort("secret"))
    assert wait(router)[1] == Abort("secret")
