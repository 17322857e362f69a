"""A long prompt passes in parts while a stream decodes and a newcomer is served: for real."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import save_tiny
from tests.e2e.server import Server, Stream, await_server, start

LAYERS = 8
LONG = "the long prompt " * 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Iterator[Server]:
    checkpoint = save_tiny(tmp_path_factory.mktemp("deep") / "deep-moe", LAYERS)
    slots = ("--experts", "slots", "--moe-cache-rate", "0.5", "--extend-threshold", "8")
    fairness = ("--max-stall-ms", "4", "--decode-share", "0.3")
    options = (*slots, *fairness, "--dtype", "float32", "--num-pages", "96", "--port", "0")
    with start(checkpoint, runtime, *options) as running:
        yield await_server(running, runtime)


def totals(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r"(?m)^freetoken_engine_(\w+?)(?:_total)? (\S+)$", text)
    return {name: float(value) for name, value in found}


def text_of(stream: Stream) -> str:
    choices = [event["choices"] for event in stream.events if event.get("choices")]
    return "".join(choice["text"] for one in choices for choice in one)  # type: ignore[attr-defined]


def test_a_stream_goes_on_and_a_newcomer_is_served_while_a_long_prompt_passes(
    server: Server,
) -> None:
    """The texts are those of undisturbed runs, which would tell any k/v or page mixed up."""
    alone = server.complete("a", max_tokens=300)
    with ThreadPoolExecutor() as threads, Stream(server.url, max_tokens=300) as stream:
        for _ in range(5):
            stream.next()
        long: Future[str] = threads.submit(server.complete, LONG, 4)
        during = 0
        while not long.done() and stream.next() is not None:
            during += 1
        newcomer = threads.submit(server.complete, "new", 4)
        second: Future[str] = threads.submit(server.complete, LONG[::-1], 4)
        stream.drain()
        texts = [long.result(), newcomer.result(), second.result()]
    assert during >= LAYERS // 2, "it got tokens between the layers"
    assert text_of(stream) == alone
    server.running.wait_for(r"(?s)( extend id=\S+ tokens=\d+ cached=\d+ path=pass.*){2}", 10)
    lines = re.findall(r" extend id=\S+ tokens=\d+ cached=\d+ path=pass", server.running.output)
    assert len(lines) == 2, "one line for each prompt"
    # Now their prefixes are cached, and nothing passes.
    assert [server.complete(prompt, 4) for prompt in (LONG, "new", LONG[::-1])] == texts


def test_the_metrics_tell_passes_and_their_parts(server: Server) -> None:
    deadline_s = time.monotonic() + 10
    while (found := totals(server))["passes"] < 2:  # they come twice a second
        assert time.monotonic() < deadline_s
    assert found["passes"] == 2
    assert 2 * LAYERS >= found["steps_pass"] >= LAYERS
    assert found["step_us_pass"] < found["step_us"]
