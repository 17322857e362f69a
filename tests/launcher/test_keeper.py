"""The keeper in a loop like the launcher's, the worker's side against it, and rude peers."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freetoken.launcher.keeper import MAX_PEERS, Keeper
from freetoken.wire.codec import WireError
from freetoken.wire.keeping import (
    MAX_PACKET_BYTES,
    NONE,
    KeepRequest,
    Verb,
    keeper_path,
    receive_packet,
    send_packet,
)
from freetoken.worker import keeper as worker_side
from freetoken.worker.keeper import FD_NAME, LauncherKeeper, ServiceKeeper, find_keeper
from tests.processes import clean_environment

ONE, OTHER = "1" * 64, "2" * 64


class Loop:
    """Serves a keeper in a thread until `stop`."""

    def __init__(self, path: Path) -> None:
        self.keeper = Keeper(path)
        self._selector = selectors.DefaultSelector()
        self._wake, self._end = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self.keeper.listen(self._selector)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is None:
                        return
                    key.data()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._end.send(b"x")
        self._thread.join()
        self.keeper.close()
        self._selector.close()
        self._wake.close()
        self._end.close()
        assert self.error is None, self.error


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(keeper_path(tmp_path))
    yield loop
    loop.stop()


@contextlib.contextmanager
def listening(tmp_path: Path) -> Iterator[tuple[Keeper, Callable[[], None]]]:
    """A keeper, and one turn of its loop."""
    keeper = Keeper(keeper_path(tmp_path))
    with selectors.DefaultSelector() as selector:
        keeper.listen(selector)

        def turn() -> None:
            for key, _ in selector.select(0):
                key.data()

        yield keeper, turn
        keeper.close()


def memory(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def assert_fds(expected: int) -> None:
    """The keeper's thread may still be hanging up."""
    deadline_s = time.monotonic() + 5
    while (found := num_fds()) != expected:
        assert time.monotonic() < deadline_s, f"{found} descriptors instead of {expected}"


def read(fd: int | None) -> bytes:
    assert fd is not None
    assert not os.get_inheritable(fd)
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def worker(tmp_path: Path) -> LauncherKeeper:
    keeper = find_keeper(tmp_path, {})
    assert isinstance(keeper, LauncherKeeper)
    return keeper


# ---- the launcher's keeper


def test_what_is_kept_is_found_again_after_its_giver_let_go(loop: Loop, tmp_path: Path) -> None:
    fd = memory(b"banks")
    worker(tmp_path).keep(ONE, fd)
    os.close(fd)
    assert read(worker(tmp_path).take(ONE)) == b"banks"
    assert read(worker(tmp_path).take(ONE)) == b"banks", "it may be taken again"


def test_a_question_for_another_frees_what_is_kept(loop: Loop, tmp_path: Path) -> None:
    before = num_fds()
    fd = memory(b"banks")
    worker(tmp_path).keep(ONE, fd)
    os.close(fd)
    assert_fds(before + 1)
    assert worker(tmp_path).take(OTHER) is None
    assert worker(tmp_path).take(ONE) is None
    assert_fds(before)


def test_a_new_memory_takes_the_place_of_the_old(loop: Loop, tmp_path: Path) -> None:
    before = num_fds()
    for digest, content in ((ONE, b"old"), (OTHER, b"new")):
        fd = memory(content)
        worker(tmp_path).keep(digest, fd)
        os.close(fd)
    assert_fds(before + 1)
    assert loop.keeper.held_digest == OTHER
    assert read(worker(tmp_path).take(OTHER)) == b"new"
    worker(tmp_path).drop()
    assert loop.keeper.held_digest is None
    assert_fds(before)


def test_closing_frees_the_memory_and_the_socket(tmp_path: Path) -> None:
    before = num_fds()
    loop = Loop(keeper_path(tmp_path))
    fd = memory(b"banks")
    worker(tmp_path).keep(ONE, fd)
    os.close(fd)
    loop.stop()
    assert_fds(before)
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_may_ask(loop: Loop, tmp_path: Path) -> None:
    assert keeper_path(tmp_path).stat().st_mode & 0o777 == 0o600


RUBBISH = [
    b"\x00\xff" * 20,
    b"KEEP",
    b"KEEP " + b"x" * 64,
    b"TAKE " + b"1" * 63,
    b"TAKE " + b"1" * 64 + b" more",
    b"BURN " + b"1" * 64,
    b"x" * (4 * MAX_PACKET_BYTES),
    "KÉEP".encode(),
]


@pytest.mark.parametrize("packet", RUBBISH)
def test_rubbish_is_dropped_and_what_is_kept_stays(
    loop: Loop, tmp_path: Path, packet: bytes
) -> None:
    fd = memory(b"banks")
    before = num_fds()
    worker(tmp_path).keep(ONE, fd)
    assert_fds(before + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(keeper_path(tmp_path)))
        send_packet(peer, packet, fd)
        assert peer.recv(100) == b"", "the line is closed"
    os.close(fd)
    assert read(worker(tmp_path).take(ONE)) == b"banks"
    assert_fds(before)  # theirs for ours


@pytest.mark.parametrize("kind", ["nothing", "pipe", "file", "empty", "socket", "five"])
def test_only_a_memory_is_kept(loop: Loop, tmp_path: Path, kind: str) -> None:
    ends = os.pipe()
    pair = socket.socketpair()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(file, b"on a disk")
    empty = os.memfd_create("empty")
    full = memory(b"banks")
    given = {
        "nothing": [],
        "pipe": [ends[0]],
        "file": [file],
        "empty": [empty],
        "socket": [pair[0].fileno()],
        "five": [empty, full, full, full, full],
    }[kind]
    before = num_fds()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(keeper_path(tmp_path)))
        socket.send_fds(peer, [KeepRequest(Verb.KEEP, ONE).encode()], given)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(100) == b""
    assert worker(tmp_path).take(ONE) is None
    assert_fds(before)
    for end in pair:
        end.close()
    for fd in (*ends, file, empty, full):
        os.close(fd)


def test_silent_peers_and_those_who_hang_up_keep_nobody_waiting(loop: Loop, tmp_path: Path) -> None:
    peers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3 * MAX_PEERS)]
    for peer in peers:
        peer.connect(str(keeper_path(tmp_path)))
        peer.settimeout(5)
    send_packet(peers[-1], KeepRequest(Verb.TAKE, ONE).encode())
    assert receive_packet(peers[-1]) == (NONE, None)
    assert peers[0].recv(100) == b"", "the oldest had to go"
    send_packet(peers[-2], KeepRequest(Verb.TAKE, ONE).encode())
    peers[-2].close()  # does not wait for its answer
    for peer in peers:
        peer.close()
    assert worker(tmp_path).take(ONE) is None


def test_who_does_not_wait_for_the_answer_has_still_given(tmp_path: Path) -> None:
    """The keeper finds request and hang-up at once."""
    with listening(tmp_path) as (keeper, turn):
        fd = memory(b"banks")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hasty:
            hasty.connect(str(keeper_path(tmp_path)))
            send_packet(hasty, KeepRequest(Verb.KEEP, ONE).encode(), fd)
        os.close(fd)
        turn()
        turn()
        assert keeper.held_digest == ONE
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(keeper_path(tmp_path)))
            send_packet(peer, KeepRequest(Verb.TAKE, ONE).encode())
            turn()
            turn()
            assert read(receive_packet(peer)[1]) == b"banks"


def test_a_peer_may_have_to_go_in_the_turn_in_which_it_speaks(tmp_path: Path) -> None:
    peers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2 * MAX_PEERS)]
    with listening(tmp_path) as (_, turn):
        for peer in peers[:MAX_PEERS]:
            peer.connect(str(keeper_path(tmp_path)))
            turn()
        for peer in peers[:MAX_PEERS]:
            send_packet(peer, b"rubbish")
        for peer in peers[MAX_PEERS:]:
            peer.connect(str(keeper_path(tmp_path)))
        for _ in range(2 * MAX_PEERS):
            turn()
    for peer in peers:
        peer.close()


def test_requests_survive_the_wire() -> None:
    for request in (
        KeepRequest(Verb.KEEP, ONE),
        KeepRequest(Verb.TAKE, OTHER),
        KeepRequest(Verb.DROP),
    ):
        assert KeepRequest.decode(request.encode()) == request
    with pytest.raises(WireError):
        KeepRequest.decode(b"KEEP ")


def test_a_keeper_without_a_place_keeps_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "absent" / "keep.sock")
    loop.stop()


# ---- the worker without a launcher


def test_without_anybody_nothing_is_kept(tmp_path: Path) -> None:
    assert find_keeper(tmp_path, {}) is None


def test_a_socket_that_nobody_serves_is_no_keeper_but_no_harm(tmp_path: Path) -> None:
    path = keeper_path(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    keeper = worker(tmp_path)
    fd = memory(b"banks")
    keeper.keep(ONE, fd)
    assert keeper.take(ONE) is None
    keeper.drop()
    os.close(fd)


class ServiceManager:
    """What systemd does with notifications; `said` are those, `stored` descriptors by name."""

    def __init__(self, address: str) -> None:
        self.said: list[list[str]] = []
        self.stored: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            text, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            lines = text.decode().splitlines()
            if lines == ["END"]:
                return
            fields = dict(line.split("=") for line in lines)
            if "BARRIER" in fields:
                os.close(fds[0])
                continue
            self.said.append(lines)
            if "FDSTORE" in fields:
                self.stored[fields["FDNAME"]] = fds[0]
            elif "FDSTOREREMOVE" in fields and (old := self.stored.pop(fields["FDNAME"], None)):
                os.close(old)

    def stop(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"END", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    manager = ServiceManager(str(tmp_path / "notify"))
    yield manager
    manager.stop()


def test_the_service_manager_keeps_the_descriptor(
    tmp_path: Path, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    keeper = find_keeper(tmp_path, environ)
    assert isinstance(keeper, ServiceKeeper)
    assert keeper.take(ONE) is None
    fd = memory(b"banks")
    keeper.keep(ONE, fd)
    os.close(fd)
    deadline_s = time.monotonic() + 5
    while FD_NAME not in manager.stored:
        assert time.monotonic() < deadline_s
    assert manager.said == [
        ["FDSTOREREMOVE=1", f"FDNAME={FD_NAME}"],  # the old one goes before the new one comes
        ["FDSTORE=1", f"FDNAME={FD_NAME}", "FDPOLL=0"],
    ]
    # The next start: descriptors in a row, by name.
    monkeypatch.setattr(worker_side, "FIRST_PASSED_FD", os.dup(manager.stored[FD_NAME]))
    passed = {"LISTEN_FDS": "1", "LISTEN_FDNAMES": FD_NAME, "LISTEN_PID": str(os.getpid())}
    again = find_keeper(tmp_path, environ | passed)
    assert again is not None
    assert read(again.take(ONE)) == b"banks"
    assert again.take(ONE) is None


def test_when_drop_returns_the_service_manager_has_let_go(
    tmp_path: Path, manager: ServiceManager
) -> None:
    keeper = ServiceKeeper({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    before = num_fds()
    fd = memory(b"banks")
    keeper.keep(ONE, fd)
    os.close(fd)
    keeper.drop()
    assert num_fds() == before
    assert manager.stored == {}


@pytest.mark.parametrize(
    "passed",
    [
        {"LISTEN_FDS": "1", "LISTEN_FDNAMES": FD_NAME, "LISTEN_PID": "1"},
        {"LISTEN_FDS": "x", "LISTEN_FDNAMES": FD_NAME, "LISTEN_PID": str(os.getpid())},
        {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "other", "LISTEN_PID": str(os.getpid())},
        {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())},
        {},
    ],
)
def test_descriptors_meant_for_others_are_left_alone(passed: dict[str, str]) -> None:
    assert ServiceKeeper({"NOTIFY_SOCKET": "/nowhere", **passed}).take(ONE) is None


def test_a_new_process_finds_what_systemd_passes_to_it(tmp_path: Path) -> None:
    """As it comes: descriptor 3, and variables that name it and this process."""
    program = (
        "import os; from pathlib import Path; from freetoken.worker.keeper import find_keeper\n"
        f"keeper = find_keeper(Path({str(tmp_path)!r}), os.environ)\n"
        f"print(os.pread(keeper.take({ONE!r}), 9, 0).decode())\n"
    )
    script = f"LISTEN_PID=$$ exec {sys.executable} -c {shlex.quote(program)} 3<&$FD"
    fd = memory(b"banks")
    passed = {"LISTEN_FDS": "1", "LISTEN_FDNAMES": FD_NAME, "NOTIFY_SOCKET": "/nowhere"}
    done = subprocess.run(
        ["bash", "-c", script.replace("$FD", str(fd))],
        env=clean_environment(**passed),
        pass_fds=[fd],
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(fd)
    assert done.stdout == "banks\n", done.stderr
