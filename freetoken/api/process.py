"""The api process: `ft api`, and a child of `ft serve`.

Order: sockets, tokenizer, then one event loop with the engine client and uvicorn. A termination
signal refuses new requests, gives running ones GRACE_S, ends the rest with an error event, and
leaves within five seconds; a second signal leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import setproctitle
import uvicorn
import uvloop
import zmq

from freetoken import log
from freetoken.api.app import build_app
from freetoken.api.engine import EngineClient
from freetoken.api.listen import BACKLOG, bind_sockets, url_of
from freetoken.api.served import Served, load_served
from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.wire.sockets import Endpoints

TITLE = "freetoken-api"
GRACE_S = 2.0
END_S = 1
"""After the grace, whole seconds as uvicorn takes them: to write the error events and close."""

LEAVING = "the server is shutting down"

_log = log.get(__name__)


def run(config: Config) -> int:
    """Serve until a signal. Raises EngineError for what ends the process."""
    log.setup(TITLE, config.log_level)
    _adopt_uvicorn_logs()
    setproctitle.setproctitle(TITLE)
    sockets = bind_sockets(config.host, config.port)
    if config.model is None:
        raise ConfigError("the api needs the model's directory; give --model DIRECTORY")
    if config.run_dir is None:
        raise ConfigError("the api needs the scheduler's run directory; give --run-dir DIRECTORY")
    endpoints = Endpoints.in_directory(config.run_dir)
    served = load_served(Path(config.model), config.served_model_name)
    gc.freeze()  # what was loaded stays: no collection needs to look at it again
    server = ApiServer(served, endpoints, sockets, config.api_key)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.run(handle_signals=True))
    return 0


def _adopt_uvicorn_logs() -> None:
    """uvicorn's warnings and errors look like ours; its chatter is left out."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:] = logging.getLogger("freetoken").handlers
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False


class ApiServer:
    """One api on one loop. `stop` may be called from its loop only."""

    def __init__(
        self,
        served: Served,
        endpoints: Endpoints,
        sockets: Sequence[socket.socket],
        api_key: str | None = None,
    ) -> None:
        self._served = served
        self._endpoints = endpoints
        self._sockets = list(sockets)
        self._api_key = api_key
        self._fatal: Exception | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def run(self, *, handle_signals: bool = False) -> None:
        """Serve until `stop`; raises what the engine client found fatal."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._engine = EngineClient(context, self._endpoints, self._die)
        self._server = _Server(
            uvicorn.Config(
                build_app(self._served, self._engine, self._api_key),
                http="httptools",
                lifespan="off",
                ws="none",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=END_S,
            )
        )
        if handle_signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        self._engine.start()
        _log.info(log.event("http.listen", urls=",".join(url_of(sock) for sock in self._sockets)))
        try:
            await self._server.serve(self._sockets)
        finally:
            self._engine.stop()
            context.destroy(linger=0)
        if self._fatal is not None:
            raise self._fatal

    def stop(self) -> None:
        """End gracefully; called again, end now."""
        if self._stopping is None:
            _log.info(log.event("api.stop", open=self._engine.num_open, grace_s=GRACE_S))
            self._engine.refuse(LEAVING)
            self._stopping = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._server.force_exit = True
            self._leave(LEAVING)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._engine.wait_idle()
        self._leave(LEAVING)

    def _leave(self, reason: str) -> None:
        self._engine.fail_all(reason)
        self._server.should_exit = True

    def _die(self, error: Exception) -> None:
        self._fatal = error
        self._engine.fail_all(str(error))
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours give streams an end first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
