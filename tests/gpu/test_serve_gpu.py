"""`ft serve` on the GPU: the text of plain transformers, whatever the path, also after a crash."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from make_moe import MoeShape, make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from freetoken.kernels.cuda_library import find_nvcc
from tests.e2e.server import Server, await_status
from tests.processes import Running, ft, kill

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

START_S = 240
NUM_NEW = 12
PROMPTS = ("abcdefgh" * 8, "the quick brown fox", "x" * 150, "a")
FAMILIES = ("qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In fp32, so that texts can be compared."""
    shape = MoeShape(
        family=request.param,
        layers=4,
        experts=16,
        top_k=2,
        hidden=128,
        expert_hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=32,
        dtype="float32",
        max_position=131072,
    )
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "moe", shape)


@pytest.fixture(scope="module")
def texts(checkpoint: Path) -> dict[str, str]:
    """What plain transformers makes of each prompt."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        for _ in range(NUM_NEW):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found[prompt] = tokenizer.decode(ids[-NUM_NEW:], skip_special_tokens=True)
    return found


@pytest.fixture(scope="module", params=["auto", "off"], ids=["compiled", "eager"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as runtime:
        options = ("--device", "cuda", "--moe-cache-rate", "0.5", "--compile", request.param)
        limits = ("--num-pages", "256", "--worker-restarts", "2", "--port", "0")
        with ft("serve", str(checkpoint), *options, *limits, XDG_RUNTIME_DIR=runtime) as running:
            yield await_server(running, Path(runtime))


def await_server(running: Running, runtime: Path) -> Server:
    found = running.wait_for(r"is served at (http://\S+)/v1", START_S)
    return Server(running, found[1], runtime)


def test_texts_equal_those_of_transformers(server: Server, texts: dict[str, str]) -> None:
    for _ in range(2):  # cold, then from the cache
        for prompt, text in texts.items():
            assert server.complete(prompt, NUM_NEW, 60) == text


def test_rows_side_by_side_get_the_same_texts(server: Server, texts: dict[str, str]) -> None:
    prompts = [prompt for prompt in texts for _ in range(3)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda prompt: server.complete(prompt, NUM_NEW, 60), prompts))
    assert got == [texts[prompt] for prompt in prompts]


def test_a_killed_worker_comes_again(server: Server, texts: dict[str, str]) -> None:
    kill(server.pids["worker"])
    await_status(server.url, 503, 20)
    await_status(server.url, 200, START_S)
    for prompt, text in texts.items():
        assert server.complete(prompt, NUM_NEW, 60) == text


def test_nothing_was_warned_of(server: Server) -> None:
    bad = ["memory.over", "Traceback", "staging buffer", "without torch.compile", "without CUDA"]
    if find_nvcc() is not None:
        bad.append("cuda.absent")
    lines = server.running.output.splitlines()
    assert not [line for line in lines if any(word in line for word in bad)]
