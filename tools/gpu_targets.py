"""What the GPU benchmark has to reach: each figure with its bound and the limit made from it.

Pure functions of measured numbers. A bound is what link and arithmetic allow, a limit the bound
with the margin that was set; a figure without a limit is shown for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench_fair import Fairness
from bench_scenarios import Decode, FirstToken
from make_moe import MoeShape

from freetoken.config import Config

MATRIX_FLOPS = 700e12  # of bf16 products on an H200, as measured in long passes
ATTENTION_FLOPS = 670e12
SMALL_HEAD = 64
SMALL_HEAD_FLOPS = 460e12  # with as many exponentials for half the products
REST_OF_PASS = 1.18  # norms, gates, copies: an H200's 350 ms over the sum of the above
ALL_HIT_MS = {1: 1.5, 4: 2.2, 8: 3.1}
GAP_MARGIN_MS = 4.0  # of a one-token extend: what HTTP, tokenizer and scheduler may add
EXTEND_MARGIN_MS = 6.0
MIN_MISS_RATE = 0.2
MAX_STALL_MS: float = Config.model_fields["max_stall_ms"].default
FAIR_SHARE = 0.8  # of the throughput that work has one after the other
MEMORY_BYTES_S = 4.26e12  # read by an H200's copies, device to device
WINDOW = 128  # of every other layer of gpt-oss
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Row:
    """`is_ceiling`: the figure must be at most `limit`, else at least. `limit` None: no target."""

    work: str
    unit: str
    figure: float
    bound: float | None = None
    limit: float | None = None
    is_ceiling: bool = True
    note: str = ""

    @property
    def passed(self) -> bool | None:
        if self.limit is None:
            return None
        return self.figure <= self.limit if self.is_ceiling else self.figure >= self.limit


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of the link, in GB/s."""

    copy: float = 55.5
    gather: float = 51.0

    def copy_ms(self, num_bytes: float) -> float:
        return num_bytes / self.copy / 1e6

    def gather_ms(self, num_bytes: float) -> float:
        return num_bytes / self.gather / 1e6


AllHit = Mapping[tuple[int, float], float]
"""ms of a decode step by (streams, temperature) when every expert is resident."""


# ---------------------------------------------------------------- sizes


def expert_bytes(shape: MoeShape) -> int:
    """Of one expert's row in a bank, in bf16."""
    inner, outer = shape.expert_hidden, shape.hidden
    sizes = [2 * inner * outer, inner * outer]
    if shape.family == "gpt_oss":
        sizes += [2 * inner, outer]
    return sum(-(-2 * size // ALIGNMENT) * ALIGNMENT for size in sizes)


def bank_bytes(shape: MoeShape) -> int:
    return shape.layers * shape.experts * expert_bytes(shape)


def memory_ms(shape: MoeShape, distinct: float) -> float:
    """What an H200 takes to read the weights of a decode step with so many distinct experts."""
    width = (shape.heads + shape.kv_heads) * shape.head_dim
    dense = shape.hidden * (2 * shape.layers * width + shape.vocab)
    return (2 * dense + distinct * expert_bytes(shape)) / MEMORY_BYTES_S * 1e3


def arithmetic_ms(shape: MoeShape, num_tokens: int) -> float:
    """What a fresh prompt should take on an H200 without waiting for the link."""
    width = shape.heads * shape.head_dim
    dense = 2 * shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim)
    experts = 6 * shape.top_k * shape.expert_hidden * shape.hidden
    products = shape.layers * num_tokens * (dense + experts)
    full, windowed = shape.layers, 0
    if shape.family == "gpt_oss":
        full, windowed = shape.layers - shape.layers // 2, shape.layers // 2
    pairs = full * num_tokens**2 / 2 + windowed * num_tokens * min(WINDOW, num_tokens)
    attention = 4 * width * pairs
    speed = ATTENTION_FLOPS if shape.head_dim > SMALL_HEAD else SMALL_HEAD_FLOPS
    seconds = products / MATRIX_FLOPS + attention / speed
    return REST_OF_PASS * seconds * 1e3


# ---------------------------------------------------------------- rows


def extend_rows(
    extends: Sequence[FirstToken],
    shape: MoeShape,
    rate: float,
    speeds: Speeds,
    all_hit: AllHit,
) -> list[Row]:
    rows = []
    for extend in extends:
        title = f"extend by {extend.tokens}, slots {rate:.0%}"
        figure = median(extend.ttft_ms)
        if not extend.work:
            rows.append(Row(title, "ms", figure, note="no counters"))
            continue
        work = {
            name: median(getattr(cost, name) for cost in extend.work)
            for name in ("slot_misses", "distinct_experts", "expert_bytes", "steps_pass")
        }
        path = "pass" if work["steps_pass"] else "on demand"
        note = f"{path}, {work['distinct_experts']:.0f} distinct, {work['slot_misses']:.0f} missed"
        missing = work["expert_bytes"]
        if work["steps_pass"]:
            missing = work["distinct_experts"] * (1 - rate) * expert_bytes(shape)
        if extend.tokens == 1:
            gap = all_hit.get((1, 0.0))
            bound = None if gap is None else gap + speeds.gather_ms(missing)
            limit = None if bound is None else 1.15 * bound + GAP_MARGIN_MS
        else:
            whole = speeds.copy_ms((1 - rate) * bank_bytes(shape))
            bound = min(speeds.gather_ms(missing), whole)
            limit = 1.15 * bound + EXTEND_MARGIN_MS
        rows.append(Row(title, "ms", figure, bound, limit, note=note))
    return rows


def fresh_rows(
    fresh: Sequence[FirstToken], shape: MoeShape, rate: float, speeds: Speeds
) -> list[Row]:
    rows = []
    for prompt in fresh:
        link = speeds.copy_ms((1 - rate) * bank_bytes(shape))
        arithmetic = arithmetic_ms(shape, prompt.tokens)
        bound = max(link, arithmetic)
        margin = 1.3 if prompt.tokens > 16384 else 1.15
        moved = median(cost.expert_bytes for cost in prompt.work) / 1e9 if prompt.work else 0.0
        note = f"link {link:.0f}, arithmetic {arithmetic:.0f} ms, {moved:.1f} GB moved"
        title = f"fresh prompt of {prompt.tokens}, slots {rate:.0%}"
        figure = median(prompt.ttft_ms)
        rows.append(Row(title, "ms", figure, bound, margin * bound, note=note))
    return rows


def fair_rows(results: Sequence[Fairness], rate: float) -> list[Row]:
    """A stream's longest gap is at most --max-stall-ms and a step; the late prompt comes first."""
    title = f"prompt of {results[0].long_tokens} beside a stream, slots {rate:.0%}"
    longest = max(result.gap_ms for result in results)
    limit = MAX_STALL_MS + median(result.gap_alone_ms for result in results)
    first = sum(result.short_first for result in results) / len(results)
    share = median(result.share for result in results)
    return [
        Row(f"{title}: the stream's longest gap", "ms", longest, None, limit),
        Row(f"{title}: a late short prompt is first", "", first, None, 1.0, is_ceiling=False),
        Row(f"{title}: throughput kept", "", share, None, FAIR_SHARE, is_ceiling=False),
    ]


def find_all_hit(decodes: Sequence[Decode]) -> dict[tuple[int, float], float]:
    """Of decodes in which (next to) nothing missed."""
    return {
        (decode.concurrency, decode.temperature): median(decode.event_p50_ms)
        for decode in decodes
        if decode.work and median(cost.miss_rate for cost in decode.work) < 0.001
    }


def decode_rows(
    decodes: Sequence[Decode], shape: MoeShape, rate: float, speeds: Speeds, all_hit: AllHit
) -> list[Row]:
    rows = []
    for decode in decodes:
        streams, temperature = decode.concurrency, decode.temperature
        title = f"decode, {streams} at temperature {temperature:g}, slots {rate:.0%}"
        if not decode.work:
            rows.append(Row(title, "ms", median(decode.gap_ms), note="no counters"))
            continue
        per_step = [
            (cost.distinct_experts / n, cost.slot_misses / n, cost.expert_bytes / n)
            for cost in decode.work
            for n in [max(1.0, cost.steps)]
        ]
        distinct, misses, missing = (median(values) for values in zip(*per_step, strict=True))
        note = f"{distinct:.0f} distinct, {misses:.1f} missed a step"
        miss_rate = median(cost.miss_rate for cost in decode.work)
        if miss_rate < 0.001:
            figure = median(decode.event_p50_ms)
            limit = ALL_HIT_MS.get(streams) if temperature == 0 else None
            bound = memory_ms(shape, distinct)
            rows.append(Row(f"{title}, all hit", "ms", figure, bound, limit, note=note))
            continue
        figure, gap = median(decode.gap_ms), all_hit.get((streams, temperature))
        bound = None if gap is None else gap + speeds.gather_ms(missing)
        limit = None
        if bound is not None and miss_rate >= MIN_MISS_RATE:
            collapse = rate <= 0.25 and streams == 8 and temperature > 0
            limit = 1.15 * bound if collapse else bound / 0.95
        rows.append(Row(title, "ms", figure, bound, limit, note=note))
    return rows


def kernel_rows(figures: Mapping[str, Any]) -> list[Row]:
    ratio = figures["gather_gb_s"] / figures["copy_gb_s"]
    note = f"{figures['gather_gb_s']:.1f} of {figures['copy_gb_s']:.1f} GB/s ({figures['fetch']})"
    return [
        Row("gather over linear copy", "", ratio, None, 0.92, is_ceiling=False, note=note),
        Row("fetch with nothing to fetch", "µs", figures["empty_us"], None, 2.5),
        Row("resolve of one token", "µs", figures["resolve_us"]),
        Row("victims put in order", "µs", figures["queue_us"]),
    ]


def policy_rows(figures: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Of replay_policy's JSON: the least ratio over all traces of a kind and numbers of slots."""
    kinds = (("lru-stack", "lru", 0.98), ("recorded", "lru", 1.0), ("cyclic", "fixed", 0.7))
    rows = []
    for kind, other, limit in kinds:
        ratios = [
            row["policy"] / row[other]
            for row in figures
            if row["trace"].startswith(kind) and row[other]
        ]
        if ratios:
            title = f"policy: hits over {other.upper() if other == 'lru' else 'a fixed set'}'s"
            rows.append(Row(f"{title}, {kind}", "", min(ratios), None, limit, is_ceiling=False))
    return rows
