"""The context that the start announces, the API tells and errors name: one number everywhere."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, await_server
from tests.processes import ft

WINDOW = 512  # of the tiny checkpoint


@contextmanager
def serve(model: Path, runtime: Path, *options: str) -> Iterator[Server]:
    argv = ("serve", str(model), "--threads", "1", "--port", "0", *options)
    with ft(*argv, XDG_RUNTIME_DIR=str(runtime), OMP_NUM_THREADS="1") as running:
        yield await_server(running, runtime)


def line_with(server: Server, what: str) -> str:
    found = [line for line in server.running.output.splitlines() if what in line]
    assert len(found) == 1, server.running.output
    return found[0]


@pytest.mark.parametrize(
    ("options", "context", "raises", "whole"),
    [
        (("--num-pages", "9"), 144, "--num-pages", "--num-pages 32"),
        pytest.param(
            *(("--context-tokens", "512", "--num-tokens", "512"), WINDOW, None, None),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(("--max-seq-len-override", "200"), 200, "--max-seq-len-override", None),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["pool below the window", "whole window", "window by option"],
)
def test_lines_models_and_errors_agree_on_the_context(
    tiny_checkpoint: Path,
    runtime: Path,
    options: tuple[str, ...],
    context: int,
    raises: str | None,
    whole: str | None,
) -> None:
    with serve(tiny_checkpoint, runtime, *options) as server:
        told = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
        assert told == context
        requested, resolved = line_with(server, " requested "), line_with(server, " resolved ")
        for flag, value in zip(options[::2], options[1::2], strict=True):
            assert f"{flag[2:].replace('-', '_')}={value}" in requested
        pages = int(re.search(r"num_pages=(\d+) page_size=16 ", resolved)[1])  # type: ignore[index]
        effective = line_with(server, "effective KV context")
        window = int(re.search(r"window (\d+)", effective)[1])  # type: ignore[index]
        assert f"effective KV context: {told} tokens" in effective
        assert told == min(window, pages * 16)
        assert (" W freetoken-worker " in effective) == (told < window) == bool(whole)
        assert whole is None or effective.endswith(f"; {whole} uses the whole window")
        assert f"effective context: {told} tokens" in server.running.output, "the launcher's line"
        body = {"prompt": [5] * (told + 1), "max_tokens": 2}
        for stream in (False, True):
            answer = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": stream})
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert f"prompt needs {told + 1} tokens" in message
            assert f" holds {told}" in message
            assert message.endswith(
                f"; raise {raises} or shorten the prompt" if raises else "; shorten the prompt"
            )
        server.running.wait_for(
            rf" W freetoken-scheduler request.refused id=\S+ tokens={told + 1} context={told} "
        )
        server.complete("a" * 20)
