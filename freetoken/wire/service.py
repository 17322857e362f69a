"""A datagram to the service manager's notification socket (sd_notify(3)), from any process."""

from __future__ import annotations

import array
import contextlib
import socket

TIMEOUT_S = 1.0


def send_notification(address: str, text: str, fd: int | None = None) -> None:
    """Best effort: a service manager that went away must not take us with it.

    `address`: the value of $NOTIFY_SOCKET, nothing is sent if it is empty · `fd`: goes along with
    FDSTORE=1 and stays open here.
    """
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
    ):
        sender.settimeout(TIMEOUT_S)
        sender.sendmsg([text.encode()], rights, 0, address)
