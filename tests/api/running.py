"""A real api server in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import httpx
import openai
import uvloop

from freetoken.api.listen import bind_sockets, url_of
from freetoken.api.process import ApiServer
from freetoken.api.served import load_served
from freetoken.wire.sockets import Endpoints


class RunningApi:
    """`url` answers once constructed; `stop` is as graceful as a signal."""

    def __init__(
        self,
        model_dir: Path,
        run_dir: Path,
        *,
        names: tuple[str, ...] = ("tiny",),
        api_key: str | None = None,
    ) -> None:
        sockets = bind_sockets("127.0.0.1", 0)
        self.url = url_of(sockets[0])
        self.error: BaseException | None = None
        served = load_served(model_dir, names)
        self._server = ApiServer(served, Endpoints.in_directory(run_dir), sockets, api_key)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        # Loading certificates, which plain http does not need, would be the slowest part of a test.
        self.http = httpx.Client(base_url=self.url, verify=False, timeout=20)
        self.http.get("/health/live").raise_for_status()

    def wait_ready(self, status: int = 200, deadline_s: float = 10) -> httpx.Response:
        end_s = time.monotonic() + deadline_s
        while True:
            response = self.http.get("/health/ready")
            if response.status_code == status:
                return response
            assert time.monotonic() < end_s, response.text

    def wait_idle(self, deadline_s: float = 10) -> None:
        """Until no sequence is open at the engine."""
        end_s = time.monotonic() + deadline_s
        while "\nfreetoken_open_sequences 0.0\n" not in self.http.get("/metrics").text:
            assert time.monotonic() < end_s, "sequences are still open"

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20)

    def request_stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._server.stop)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.request_stop()
        self.join()

    def join(self) -> None:
        self.http.close()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "the api did not end"

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.run()

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except Exception as error:
            self.error = error
