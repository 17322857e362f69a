"""What a step costs, from the link, the routing and the arithmetic: pure functions of numbers.

worker/threshold.py compares a step on demand with a pass from what it measures, `ft plan` predicts
speeds from what it is told. Times are in seconds, rates in bytes or operations per second.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

GATHER_RATE = 0.92
"""Bytes per second of gathering scattered experts over those of copying whole layers, where it is
not measured (H200, PCIe 5 x16: 51 against 55.5 GB/s, 2026-12-01)."""
LAYER_S = 60e-6
"""What a layer of a small step costs beside moving bytes (H200, compiled, in a graph, 2026-12-01:
1.3 to 1.5 ms for 16 layers of Qwen3-30B-A3B's shape, of which 0.4 ms are bytes)."""
LRU_STACK = ((0.0, 0.0), (1 / 16, 0.50), (1 / 8, 0.66), (1 / 4, 0.84), (3 / 8, 0.92), (1.0, 1.0))
"""Share of the experts that are resident, and share of one stream's look-ups that find theirs, when
routing follows an LRU stack: figures for 128 experts, 8 a token, scaled to other numbers."""


@dataclass(frozen=True, slots=True)
class Link:
    """Host to device: whole layers by the copy engine, scattered rows by a kernel."""

    copy_bytes_s: float
    gather_bytes_s: float

    @classmethod
    def of_copy(cls, copy_bytes_s: float) -> Link:
        """A link of which only the rate of copies is known."""
        return cls(copy_bytes_s, GATHER_RATE * copy_bytes_s)


@dataclass(frozen=True, slots=True)
class Routed:
    """The routed experts of a model: L layers of E experts, K a token, bytes of one."""

    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int

    @property
    def bank_bytes(self) -> int:
        return self.num_layers * self.num_experts * self.expert_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """What a model reads and computes. `dense_bytes`: weights but experts that every step reads ·
    `head_bytes`: the part of them that only sampled tokens use · `query_width`: elements of a
    token's queries · `num_attention_layers`: with k/v · `element_bytes`: of a weight."""

    routed: Routed
    dense_bytes: int
    head_bytes: int
    kv_token_bytes: int
    query_width: int
    num_attention_layers: int
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """`vram_bytes_s`, `operations_s`: what kernels reach, not what the data sheet says."""

    link: Link
    vram_bytes_s: float
    operations_s: float


# ---------------------------------------------------------------- routing


def distinct_uniform(routed: Routed, num_tokens: int) -> float:
    """Experts that `num_tokens` tokens ask for in one layer when each is as likely as any other."""
    if not routed.num_experts:
        return 0.0
    spared: float = (1 - routed.top_k / routed.num_experts) ** num_tokens
    return routed.num_experts * (1 - spared)


def hit_rate_lru_stack(resident_rate: float) -> float:
    """Share of one stream's look-ups that hit with a usual locality, linear between LRU_STACK."""
    for (low, low_rate), (high, high_rate) in pairwise(LRU_STACK):
        if resident_rate <= high:
            return low_rate + (resident_rate - low) / (high - low) * (high_rate - low_rate)
    return 1.0


# ---------------------------------------------------------------- on demand against a pass


def on_demand_s(
    routed: Routed, link: Link, resident_rate: float, distinct: float, resident_s: float
) -> float:
    """A step on demand: what it takes if all is resident, and the missing ones of `distinct`
    experts a layer, gathered before they are used."""
    missing = routed.num_layers * distinct * (1 - resident_rate)
    return resident_s + missing * routed.expert_bytes / link.gather_bytes_s


def pass_s(routed: Routed, link: Link, resident_rate: float, compute_s: float) -> float:
    """A pass: all that miss are copied while it computes."""
    return max((1 - resident_rate) * routed.bank_bytes / link.copy_bytes_s, compute_s)


# ---------------------------------------------------------------- predictions


def resident_step_s(work: Work, machine: Machine, context_tokens: int) -> float:
    """A decode step of one row whose experts are all resident."""
    routed = work.routed
    read_bytes = (
        work.dense_bytes
        + routed.num_layers * routed.top_k * routed.expert_bytes
        + context_tokens * work.kv_token_bytes
    )
    return work.num_attention_layers * LAYER_S + read_bytes / machine.vram_bytes_s


def decode_tokens_s(work: Work, machine: Machine, hit_rate: float, context_tokens: int) -> float:
    """Tokens per second of one stream."""
    routed = work.routed
    missing = routed.num_layers * routed.top_k * (1 - hit_rate)
    fetch_s = missing * routed.expert_bytes / machine.link.gather_bytes_s
    return 1 / (resident_step_s(work, machine, context_tokens) + fetch_s)


def prompt_s(
    work: Work, machine: Machine, resident_rate: float, num_tokens: int, pass_tokens: int
) -> float:
    """A fresh prompt in passes of at most `pass_tokens` tokens."""
    num_passes = -(-num_tokens // pass_tokens)
    compute_s = prompt_operations(work, num_tokens) / machine.operations_s
    each_s = pass_s(work.routed, machine.link, resident_rate, compute_s / num_passes)
    return num_passes * each_s


def prompt_operations(work: Work, num_tokens: int) -> float:
    """Multiplications and additions of a fresh prompt: two per weight, and causal attention."""
    routed = work.routed
    active_bytes = (
        work.dense_bytes - work.head_bytes + routed.num_layers * routed.top_k * routed.expert_bytes
    )
    products = 2 * active_bytes / work.element_bytes * num_tokens
    attention = 2 * num_tokens**2 * work.query_width * work.num_attention_layers
    return products + attention
