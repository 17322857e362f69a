"""A stand-in for a room: `fake_room.py NAME PORT BEHAVIOUR [--stand-by] --launcher-pid PID`.

The api answers /health/ready, and gives up the process that FAKE_DIR/given_up names; the others
wait. BEHAVIOUR: `well`; `deaf` ignores
SIGTERM; `orphanable` starts a child of its own; `refuses` ends with a configuration error, and
`refuses-again` when it is started for the second time; `crashes` with a traceback; `busy` holds the
interpreter in C code that never lets go of it.
"""

import json
import os
import re
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from freetoken.launcher import guard


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        sizes = {"loaded_bytes": 0, "total_bytes": 0, "context_tokens": 64}
        given_up = Path(os.environ.get("FAKE_DIR", ""), "given_up")
        pid = int(given_up.read_text()) if given_up.exists() else 0
        phase, status = ("dead", 503) if pid else ("ready", 200)
        state = {"phase": phase, "detail": "it sleeps" if pid else "", "given_up_pid": pid}
        body = json.dumps({**state, "model": "fake", **sizes}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def end(number: int, frame: object) -> None:
    sys.exit(0)


def main() -> None:
    name, port, behaviour = sys.argv[1:4]
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else end)
    guard.end_with_launcher(int(sys.argv[-1]), leaves_files=behaviour == "deaf")
    if behaviour == "refuses-again":
        first = Path(os.environ["FAKE_DIR"]) / name
        behaviour = "refuses" if first.exists() else "well"
        first.touch()
    if behaviour == "refuses":
        print(f"{name}: error: no room for 7 pages", file=sys.stderr)
        sys.exit(2)
    if behaviour == "crashes":
        raise RuntimeError("out of ideas")
    if behaviour == "orphanable":
        grandchild = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        print(f"grandchild {grandchild.pid}", flush=True)
    if "--stand-by" in sys.argv:
        print(f"standby pid {os.getpid()}", flush=True)
        guard.await_call()
    if name == "freetoken-api":
        server = ThreadingHTTPServer(("127.0.0.1", int(port)), Answers)
        print(f"{name} pid {os.getpid()}", flush=True)
        server.serve_forever(poll_interval=0.05)
    print(f"{name} pid {os.getpid()}", flush=True)
    if behaviour == "busy":
        re.match(r"(a+)+$", "a" * 64 + "b")
    while True:
        signal.pause()


main()
