"""The servers of bench_cpu: FreeToken and llama.cpp on the demo, started and calibrated."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cpu_engines import HttpEngine
from make_gguf import make_demo_gguf
from openai_load import Server
from server_process import free_port, running_server

from freetoken.demo.build import default_cache_dir

READY_S = 300.0
GGUF_NAME = "smollm2-135m-8x2-bf16.gguf"


@asynccontextmanager
async def freetoken_server(
    demo: Path, log_file: Path, *, threads: int, options: list[str]
) -> AsyncIterator[HttpEngine]:
    """`ft serve` of the demo with further `options`."""
    port = free_port()
    command = [sys.executable, "-m", "freetoken.cli", "serve", str(demo)]
    command += ["--port", str(port), "--threads", str(threads), *options]
    async with _serving("freetoken", command, port, "/health/ready", log_file) as engine:
        yield engine


@asynccontextmanager
async def llama_server(
    binary: Path, log_file: Path, *, threads: int, streams: int, context_tokens: int
) -> AsyncIterator[HttpEngine]:
    """llama.cpp's server with room for `streams` sequences of `context_tokens` tokens."""
    gguf = default_cache_dir() / "bench" / GGUF_NAME
    if not gguf.is_file():
        make_demo_gguf(gguf)
    port = free_port()
    command = [str(binary), "--model", str(gguf), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--threads", str(threads), "--parallel", str(streams)]
    command += ["--ctx-size", str(streams * context_tokens)]
    async with _serving("llama.cpp", command, port, "/health", log_file) as engine:
        yield engine


@asynccontextmanager
async def _serving(
    name: str, command: list[str], port: int, ready_path: str, log_file: Path
) -> AsyncIterator[HttpEngine]:
    url = f"http://127.0.0.1:{port}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FREETOKEN_")}
    with running_server(
        command,
        url,
        ready_path=ready_path,
        log_file=log_file,
        timeout_s=READY_S,
        environment=environment,
    ):
        async with Server(url) as server:
            await server.learn()
            await server.drop_unsupported()
            yield HttpEngine(name, server)
