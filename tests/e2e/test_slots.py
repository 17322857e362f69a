"""`--experts slots` for real: what crosses to the slots, as the extend lines tell it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, await_server, start

LAYERS, EXPERTS, TOP_K = 2, 4, 2
SLOTS = 2
EXPERT_BYTES = 3 * 16 * 32 * 4  # gate, up and down of the tiny checkpoint in fp32
THRESHOLD = 4


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, runtime: Path) -> Iterator[Server]:
    slots = ("--experts", "slots", "--moe-cache-size", str(SLOTS))
    limits = ("--extend-threshold", str(THRESHOLD), "--max-step-tokens", "16")
    options = (*slots, *limits, "--dtype", "float32", "--port", "0")
    with start(tiny_checkpoint, runtime, *options) as running:
        yield await_server(running, runtime)


def extends(server: Server) -> list[tuple[int, int, str, int]]:
    """(tokens, cached, path, bytes) of every extend so far."""
    found = re.findall(
        r" extend id=\S+ tokens=(\d+) cached=(\d+) path=(\w+) ms=\S+ bytes=(\d+)",
        server.running.output,
    )
    return [(int(tokens), int(cached), path, int(size)) for tokens, cached, path, size in found]


def test_a_pass_loads_what_is_missing_once_and_a_small_extend_only_what_it_asks_for(
    server: Server,
) -> None:
    short, long = "a" * 20, "b" * 200
    first = server.complete(short)
    server.complete(long)
    again = server.complete(short)
    server.running.wait_for(r"(?s)( extend id=.*){3}", 10)
    *passes, (tokens, cached, path, size) = extends(server)
    missing = LAYERS * EXPERTS - SLOTS  # the warm-up has filled the slots
    assert [path for _, _, path, _ in passes] == ["pass", "pass"]
    assert [size for *_, size in passes] == [missing * EXPERT_BYTES] * 2
    assert (path, tokens) == ("on_demand", 1)
    assert cached >= len(short) - 1
    assert size <= tokens * TOP_K * LAYERS * EXPERT_BYTES
    assert again == first
