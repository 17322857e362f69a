"""bench_cpu: engines in turns, medians and ratios, and what lies between worker and client."""

from __future__ import annotations

import asyncio
import io
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from bench_cpu import main, print_result
from cpu_cases import Figure, Overhead, Sizes, count_runs, read_counters, run_rounds
from cpu_engines import HttpEngine, Run, TransformersEngine
from exact_prompts import WORDS, PromptMaker
from openai_load import BenchError, Server
from rich.console import Console
from server_process import free_port, running_server
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.tools.fake_openai import FakeServer

SIZES = Sizes(
    prompt_tokens=10, decode_tokens=11, streams=2, long_prompt_tokens=50, step_tokens=21, rounds=3
)
PROMPTS = PromptMaker(WORDS, 1.0, 0)


class FixedEngine:
    """Half as fast as the fake server decodes, twice as slow to the first token."""

    name = "transformers"

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    async def run(self, prompts: Sequence[str], max_tokens: int) -> Run:
        self.seen.append(tuple(prompts))
        return Run(ttft_ms=100.0, decode_tps=50.0 if max_tokens > 1 else None, total_tps=40.0)


def run_all(fake: FakeServer) -> tuple[list[Figure], list[Overhead], FixedEngine, list[str]]:
    reference, told = FixedEngine(), []

    async def run() -> tuple[list[Figure], list[Overhead]]:
        async with Server("http://fake", model="fake", transport=fake, clock=fake.clock) as server:
            served = HttpEngine("freetoken", server)
            return await run_rounds(
                [reference, served],
                served,
                PROMPTS,
                SIZES,
                random.Random(3),
                told.append,
                settle_s=0,
            )

    figures, overheads = asyncio.run(run())
    return figures, overheads, reference, told


def test_figures_are_the_servers_known_speeds() -> None:
    figures, _, _, told = run_all(FakeServer())
    values = {figure.title: figure.values for figure in figures}
    assert values["decode, 1 stream"] == pytest.approx({"transformers": 50.0, "freetoken": 100.0})
    assert values["decode, 2 together"]["freetoken"] == pytest.approx(200.0, rel=0.1)
    assert values["TTFT, 50 tokens, fresh"] == pytest.approx(
        {"transformers": 100.0, "freetoken": 50.0}
    )
    assert values["TTFT, 50 tokens, cached"] == pytest.approx({"freetoken": 1.0})
    assert len(told) == count_runs(SIZES, 2)


def test_every_round_has_prompts_of_its_own() -> None:
    _, _, reference, _ = run_all(FakeServer())
    prompts = [prompt for prompts in reference.seen for prompt in prompts]
    assert len(prompts) == SIZES.rounds * (1 + SIZES.streams + 1)
    assert len(set(prompts)) == len(prompts)


def test_the_share_between_worker_and_client_is_that_of_decode_steps() -> None:
    _, overheads, _, _ = run_all(FakeServer(worker_share=0.8, prefill_s=0.05))
    assert len(overheads) == SIZES.rounds
    for overhead in overheads:
        assert overhead.gap_ms == pytest.approx(10.0)
        assert overhead.step_ms == pytest.approx(8.0)
        assert overhead.share == pytest.approx(0.25)


def test_a_server_that_stops_early_is_no_reference() -> None:
    class Early(FakeServer):
        def _usage(self, prompt: int, completion: int, cached: int) -> dict[str, object]:
            return super()._usage(prompt, completion - 1, cached)

    with pytest.raises(BenchError, match="10 of 11 tokens; it must support ignore_eos"):
        run_all(Early())


def test_metrics_without_step_time_are_refused() -> None:
    with pytest.raises(BenchError, match="step_us"):
        read_counters("freetoken_engine_steps_total 3\n")


def test_ratios_say_how_many_times_better_we_are() -> None:
    figures, overheads, _, _ = run_all(FakeServer())
    text = io.StringIO()
    print_result(figures, overheads, {"1 rows, decode": "eager"}, Console(file=text, width=120))
    lines = [line.split() for line in text.getvalue().splitlines()]
    decode = next(line for line in lines if line[:3] == ["decode,", "1", "stream"])
    assert decode[3:] == ["tokens/s", "50", "100", "2.00"]
    fresh = next(line for line in lines if line[-1:] == ["2.00"] and line[0] == "TTFT,")
    assert fresh[3:] == ["fresh", "ms", "100", "50", "2.00"]
    assert "+25.0%" in text.getvalue()
    assert "cached over fresh TTFT: 0.020" in text.getvalue()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random MoE of two layers whose tokens are words."""
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(
        models.WordLevel({word.strip(): i for i, word in enumerate(WORDS)}, unk_token="the")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def _threads() -> Iterator[None]:
    """The engine sets torch's threads for the process; other tests get theirs back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
def test_transformers_picks_an_implementation_per_case(tiny: Path) -> None:
    engine = TransformersEngine(
        tiny, threads=1, implementations=["eager", "grouped_mm", "batched_mm"]
    )
    prompts = [PROMPTS.make(6, random.Random(seed)) for seed in range(3)]
    run = asyncio.run(engine.run(prompts, 5))
    first = asyncio.run(engine.run(prompts[:1], 1))
    assert set(engine.chosen) == {"3 rows, decode", "1 rows, first token"}
    assert set(engine.chosen.values()) <= {"eager", "grouped_mm", "batched_mm"}
    assert run.decode_tps is not None
    assert min(run.decode_tps, run.total_tps) > 0
    assert first.decode_tps is None
    assert first.ttft_ms > 0


@pytest.mark.usefixtures("_threads")
def test_prompts_of_several_lengths_are_no_batch(tiny: Path) -> None:
    engine = TransformersEngine(tiny, threads=1, implementations=["grouped_mm"])
    with pytest.raises(BenchError, match=r"\[1, 2\] tokens"):
        asyncio.run(engine.run([" the", " the of"], 2))


SERVE_ONCE = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


def test_a_server_is_waited_for_and_ended(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVE_ONCE, str(port)]
    url = f"http://127.0.0.1:{port}"
    log_file = tmp_path / "log"
    with running_server(command, url, ready_path="/ready", log_file=log_file, timeout_s=60):
        pass
    with pytest.raises(BenchError, match="ended with code 3: no such model"):  # noqa: SIM117
        with running_server(
            [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"],
            url,
            ready_path="/ready",
            log_file=log_file,
            timeout_s=60,
        ):
            pytest.fail("it is not ready")


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVE_ONCE, str(port)]
    with pytest.raises(BenchError, match=r"is not ready after 0\.01 s: no output"):  # noqa: SIM117
        with running_server(
            command,
            f"http://127.0.0.1:{port}",
            ready_path="/never",
            log_file=tmp_path / "log",
            timeout_s=0.01,
        ):
            pytest.fail("it is not ready")


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot start /no/such/server"):  # noqa: SIM117
        with running_server(
            ["/no/such/server"],
            "http://127.0.0.1:9",
            ready_path="/",
            log_file=tmp_path / "log",
            timeout_s=1,
        ):
            pytest.fail("it is not ready")


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--rounds", "many"])
    assert "--rounds" in capsys.readouterr().err
