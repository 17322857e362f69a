from __future__ import annotations

import os
import subprocess
import sys

import zmq

from freetoken.scheduler.peers import PeerTable
from freetoken.wire.beats import LOST_S, MAX_BREAK_S, BeatServer, Heard
from freetoken.wire.messages import PROTOCOL_VERSION, Beat, Hello, Phase, Role


class FakeBeats(BeatServer):
    """Hears what it is told; no socket, no thread."""

    def __init__(self) -> None:
        self._heard = {}

    def hear(self, name: str, at_s: float) -> None:
        self._heard[name] = Heard(Beat(name, 1, 0, Phase.READY, "", 0, 0), at_s)


def look(table: PeerTable, start_s: float, end_s: float) -> None:
    """As the loop does, all the time; nobody is gone."""
    while start_s < end_s:
        assert table.gone(start_s) == []
        start_s += MAX_BREAK_S


def hello(name: str, pid: int) -> Hello:
    return Hello(PROTOCOL_VERSION, Role.API, name, pid)


def test_a_silent_peer_is_gone_after_the_limit() -> None:
    beats = FakeBeats()
    table = PeerTable(zmq.Poller(), beats)
    peer = table.add(b"a", hello("a", os.getpid()), 1, now_s=0.0)
    beats.hear("a", 1.0)
    look(table, 0.0, 1.0 + LOST_S)
    assert table.gone(1.0 + LOST_S) == []
    reason = f"process {os.getpid()} has had no heartbeat for 5 s"
    assert table.gone(1.1 + LOST_S) == [(peer, reason)]
    table.remove(peer)
    assert table.gone(1.1 + LOST_S) == []
    assert table.get(b"a") is None
    assert beats.heard("a") is None


def test_a_peer_that_cannot_be_watched_and_never_beats_is_gone_too() -> None:
    table = PeerTable(zmq.Poller(), FakeBeats())
    peer = table.add(b"a", hello("a", -1), 1, now_s=10.0)
    assert peer.has_exited is None
    look(table, 9.0, 10.0 + LOST_S)
    assert table.gone(10.0 + LOST_S) == []
    assert [found for found, _ in table.gone(10.1 + LOST_S)] == [peer]


def test_the_silence_that_we_slept_through_is_nobody_s() -> None:
    beats = FakeBeats()
    table = PeerTable(zmq.Poller(), beats)
    peer = table.add(b"a", hello("a", os.getpid()), 1, now_s=0.0)
    beats.hear("a", 1.0)
    assert table.gone(1.5) == []
    look(table, 100.0, 100.0 + LOST_S)
    assert [found for found, _ in table.gone(100.1 + LOST_S)] == [peer]


def test_an_exit_wakes_the_poller_and_names_the_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    poller = zmq.Poller()
    table = PeerTable(poller, FakeBeats())
    peer = table.add(b"a", hello("a", process.pid), 1, now_s=0.0)
    assert peer.has_exited is False
    process.communicate(b"\n")
    assert poller.poll(5000)
    assert table.gone(0.0) == [(peer, f"process {process.pid} has exited")]
    table.remove(peer)
    assert not poller.sockets
