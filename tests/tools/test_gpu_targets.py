"""Bounds and limits of the GPU benchmark are what its table says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_gpu
import pytest
from bench_fair import Fairness
from bench_scenarios import Decode, FirstToken
from engine_counters import EngineWork
from gpu_busy import idle_share
from gpu_report import print_rows
from gpu_targets import (
    Row,
    Speeds,
    arithmetic_ms,
    bank_bytes,
    decode_rows,
    expert_bytes,
    extend_rows,
    fair_rows,
    find_all_hit,
    fresh_rows,
    kernel_rows,
    policy_rows,
)
from make_moe import SHAPES
from rich.console import Console

QWEN3, GPT_OSS = SHAPES["qwen3"], SHAPES["gpt-oss"]
SPEEDS = Speeds(50.0, 40.0)
ROW = 3 * 2048 * 768 * 2


def work(**values: float) -> EngineWork:
    names = EngineWork.__slots__
    return EngineWork(**(dict.fromkeys(names, 0.0) | values))


def first_token(tokens: int, ttft_ms: float, cost: EngineWork) -> FirstToken:
    return FirstToken(tokens, (ttft_ms,), (2048 + tokens,), (2048,), (cost,))


def decode(streams: int, temperature: float, gap_ms: float, cost: EngineWork) -> Decode:
    gaps: tuple[float, ...] = (gap_ms,)
    return Decode(streams, temperature, gaps, gaps, gaps, (1e3 / gap_ms,), 1.0, (cost,))


def test_sizes_are_those_of_the_layouts() -> None:
    assert expert_bytes(QWEN3) == ROW
    assert bank_bytes(QWEN3) == pytest.approx(19.33e9, rel=0.001)
    assert expert_bytes(GPT_OSS) == 3 * 2880 * 2880 * 2 + 2 * (2 * 2880 + 2880) + 128
    assert bank_bytes(GPT_OSS) == pytest.approx(19.1e9, rel=0.01)


def test_arithmetic_of_a_long_prompt_is_what_was_measured() -> None:
    assert arithmetic_ms(QWEN3, 32768) == pytest.approx(350, rel=0.05)
    assert arithmetic_ms(GPT_OSS, 32768) > arithmetic_ms(GPT_OSS, 8192) * 4


@pytest.mark.parametrize(
    ("tokens", "cost", "bound", "limit"),
    [
        (1, work(slot_misses=64, distinct_experts=128, expert_bytes=64 * ROW), 17.0, 23.6),
        (16, work(slot_misses=500, distinct_experts=1100, expert_bytes=500 * ROW), 118.0, 141.7),
        (1024, work(steps_pass=1, distinct_experts=2048, expert_bytes=1), 193.3, 228.3),
    ],
)
def test_an_extend_is_held_to_the_cheaper_of_both_ways(
    tokens: int, cost: EngineWork, bound: float, limit: float
) -> None:
    extends = [first_token(tokens, 100.0, cost)]
    [row] = extend_rows(extends, QWEN3, 0.5, SPEEDS, {(1, 0.0): 1.9})
    assert row.bound == pytest.approx(bound, abs=0.2)
    assert row.limit == pytest.approx(limit, abs=0.3)
    assert row.passed == (limit > 100)


def test_a_fresh_prompt_is_held_to_link_or_arithmetic() -> None:
    prompts = [first_token(8192, 220.0, work()), first_token(32768, 400.0, work())]
    short, long = fresh_rows(prompts, QWEN3, 0.5, SPEEDS)
    assert short.bound == pytest.approx(193.3, abs=0.1)
    assert short.passed
    assert long.bound == arithmetic_ms(QWEN3, 32768)
    assert long.limit == 1.3 * arithmetic_ms(QWEN3, 32768)


def test_decoding_with_misses_is_held_to_the_gap_without_and_the_bytes() -> None:
    resident = [decode(8, 1.0, 3.0, work(steps=100, slot_hits=1e5))]
    all_hit = find_all_hit(resident)
    assert all_hit == {(8, 1.0): 3.0}
    hits = work(steps=9, slot_hits=9 * 808, distinct_experts=9 * 808)
    [row] = decode_rows([decode(8, 0.0, 3.0, hits)], QWEN3, 1.0, SPEEDS, {})
    assert (row.limit, row.bound) == (3.1, pytest.approx(2.08, abs=0.01))
    [row] = decode_rows([decode(8, 0.0, 3.0, hits)], GPT_OSS, 1.0, SPEEDS, {})
    assert row.bound == pytest.approx((808 * 0.0498 + 1.16 + 0.64) / 4.26, rel=0.01)
    cost = work(steps=10, slot_hits=500, slot_misses=500, expert_bytes=500 * ROW)
    for rate, limit in ((0.5, 14.8 / 0.95), (0.25, 1.15 * 14.8)):
        [row] = decode_rows([decode(8, 1.0, 16.0, cost)], QWEN3, rate, SPEEDS, all_hit)
        assert row.bound == pytest.approx(14.8, abs=0.1)
        assert row.limit == pytest.approx(limit, abs=0.1)
    few = work(steps=10, slot_hits=900, slot_misses=100, expert_bytes=ROW)
    [row] = decode_rows([decode(8, 1.0, 16.0, few)], QWEN3, 0.5, SPEEDS, all_hit)
    assert row.limit is None


def test_what_is_not_known_has_no_limit() -> None:
    silent = FirstToken(16, (5.0,), (2064,), (2048,))
    assert extend_rows([silent], QWEN3, 0.5, SPEEDS, {})[0].limit is None
    cost = work(steps=10, slot_misses=500, expert_bytes=ROW)
    assert decode_rows([decode(4, 0.0, 9.0, cost)], QWEN3, 0.5, SPEEDS, {})[0].limit is None


def test_kernels_and_policy_have_floors_and_ceilings() -> None:
    figures: dict[str, Any] = {
        "copy_gb_s": 50.0,
        "gather_gb_s": 47.0,
        "fetch": "cuda",
        "empty_us": 3.0,
        "resolve_us": 5.0,
        "queue_us": 9.0,
    }
    assert [row.passed for row in kernel_rows(figures)] == [True, False, None, None]
    traces = [
        {"trace": "lru-stack", "policy": 99, "lru": 100, "fixed": 50},
        {"trace": "recorded", "policy": 99, "lru": 100, "fixed": 50},
        {"trace": "cyclic", "policy": 35, "lru": 0, "fixed": 50},
    ]
    assert [row.passed for row in policy_rows(traces)] == [True, False, True]


def test_idle_time_is_what_no_step_covers() -> None:
    assert idle_share([(0, 10_000), (11_000, 20_000), (30_000, 40_000)]) == 11 / 40
    assert idle_share([(0, 10_000), (9_999, 20_000)]) == 0, "clocks are read one after the other"
    with pytest.raises(ValueError, match="1 steps"):
        idle_share([(0, 10)])


def test_fairness_is_held_to_the_servers_default() -> None:
    fair = Fairness(
        long_tokens=32768,
        long_alone_ms=400,
        short_alone_ms=10,
        gap_alone_ms=5,
        long_ms=500,
        short_ms=30,
        gap_ms=254,
        gap_p50_ms=100,
        during=5,
        short_first=True,
        share=0.87,
    )
    assert [row.passed for row in fair_rows([fair], 0.5)] == [True, True, True]
    slow = replace(fair, gap_ms=256, short_first=False, share=0.79)
    assert [row.passed for row in fair_rows([fair, fair, slow], 0.5)] == [False, False, True]


def test_the_table_says_what_was_missed() -> None:
    text = io.StringIO()
    rows = [Row("a", "ms", 12.0, 10.0, 11.0), Row("b", "s", 12.0, None, 15.0)]
    print_rows(rows, "title", Console(file=text, width=120))
    lines = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    assert lines[-2] == ["a", "12", "ms", "10", "1.20", "11", "MISSED"]
    assert lines[-1] == ["b", "12", "s", "–", "–", "15", "pass"]


def test_a_part_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(bench_gpu.Bench, "_make", lambda self, model: None)
    file = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--only", "kernels", "--directory", str(tmp_path)]
    assert bench_gpu.main([*arguments, "--rates", "--json", str(file)]) == 0
    told = capsys.readouterr().out
    assert "FAILED kernels: CalledProcessError" in told
    assert "gpu_kernels: error: torch finds no GPU" in told
    assert "tiny, 2 layers" in told
    data = json.loads((tmp_path / "out-tiny.json").read_text())
    assert list(data["parts"]) == ["failed: kernels"]
