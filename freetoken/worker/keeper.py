"""Who keeps the banks' memory for the next worker: the launcher, else the service manager.

Both keep one descriptor. Whatever goes wrong with them is logged; banks are then read again.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping
from pathlib import Path

from freetoken import log
from freetoken.model.banks import BankKeeper
from freetoken.wire.keeping import OK, KeepRequest, Verb, keeper_path, receive_packet, send_packet
from freetoken.wire.service import send_notification

TIMEOUT_S = 5.0
FD_NAME = "freetoken-bank"
FIRST_PASSED_FD = 3
"""SD_LISTEN_FDS_START of sd_listen_fds(3)."""

_log = log.get(__name__)


def find_keeper(run_dir: Path, environ: Mapping[str, str]) -> BankKeeper | None:
    """The launcher that listens in `run_dir`, else a service manager, else None."""
    path = keeper_path(run_dir)
    if path.is_socket():
        return LauncherKeeper(path)
    if environ.get("NOTIFY_SOCKET"):
        return ServiceKeeper(environ)
    return None


class LauncherKeeper:
    """Asks launcher/keeper.py; the protocol is wire/keeping.py's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self, digest: str) -> int | None:
        answer, fd = self._ask(KeepRequest(Verb.TAKE, digest))
        if fd is not None and answer != OK:
            os.close(fd)
            return None
        return fd

    def keep(self, digest: str, fd: int) -> None:
        answer, _ = self._ask(KeepRequest(Verb.KEEP, digest), fd)
        if answer != OK:
            _log.warning(log.event("bank.unkept", why="the launcher did not take it"))

    def drop(self) -> None:
        self._ask(KeepRequest(Verb.DROP))

    def _ask(self, request: KeepRequest, fd: int | None = None) -> tuple[bytes, int | None]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as launcher:
                launcher.connect(str(self._path))
                launcher.settimeout(TIMEOUT_S)  # before it, a full queue would be an error
                send_packet(launcher, request.encode(), fd)
                return receive_packet(launcher)
        except OSError as error:
            _log.warning(log.event("keeper.silent", request=request.verb, why=error))
            return b"", None


class ServiceKeeper:
    """systemd's descriptor store (FileDescriptorStoreMax=, sd_pid_notify_with_fds(3)).

    It does not know digests: `take` gives whatever bank it has.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._passed = _passed_fds(environ)

    def take(self, digest: str) -> int | None:
        fd = self._passed.pop(FD_NAME, None)
        if fd is not None:
            os.set_inheritable(fd, False)
        return fd

    def keep(self, digest: str, fd: int) -> None:
        self.drop()
        # No FDPOLL: a memfd has no other end that could hang up.
        send_notification(self._address, f"FDSTORE=1\nFDNAME={FD_NAME}\nFDPOLL=0", fd)

    def drop(self) -> None:
        send_notification(self._address, f"FDSTOREREMOVE=1\nFDNAME={FD_NAME}")
        self._wait()

    def _wait(self) -> None:
        """Until all that we said was done (sd_notify_barrier(3)): the memory is free then."""
        done, undone = os.pipe()
        send_notification(self._address, "BARRIER=1", undone)
        os.close(undone)
        select.select([done], [], [], TIMEOUT_S)  # the last copy of the other end is closed
        os.close(done)


def _passed_fds(environ: Mapping[str, str]) -> dict[str, int]:
    """Descriptors that the service manager has passed to this process, by name."""
    count = environ.get("LISTEN_FDS", "")
    if not count.isdigit() or environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    fds = range(FIRST_PASSED_FD, FIRST_PASSED_FD + int(count))
    return dict(zip(names, fds, strict=False))
