"""What steps cost on a GPU that is not there: times from experts/cost.py's formulas.

Assumptions beside those: routing is uniform across rows, but each row that decodes comes back to
its favourites, so that a step of one finds its experts in the slots as often as an LRU stack says,
and a wide one as often as experts are resident, as new prompts do (`hit_rate`). On-demand steps in
the pauses of a pass do not slow its copies down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from freetoken.experts.cost import (
    LAYER_S,
    Machine,
    Routed,
    Work,
    distinct_uniform,
    hit_rate_lru_stack,
    on_demand_s,
    pass_s,
)
from freetoken.wire.messages import Extend, StepMode, StepPlan, StepStats, unpack_ids
from freetoken.worker.threshold import PASS_LAYER_S, Threshold

QWEN3_30B_A3B = Work(
    Routed(num_layers=48, num_experts=128, top_k=8, expert_bytes=3 * 2048 * 768 * 2),
    dense_bytes=48 * 2 * (2048 * (4096 + 2 * 512) + 4096 * 2048 + 2048 * 128) + 2 * 151_936 * 2048,
    head_bytes=2 * 151_936 * 2048,
    kv_token_bytes=48 * 2 * 4 * 128 * 2,
    query_width=32 * 128,
    num_attention_layers=48,
    element_bytes=2,
)
"""By its config.json: bf16, 32 query and 4 key heads of 128."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A model on a machine; `resident_rate` of its experts have slots."""

    work: Work
    machine: Machine
    resident_rate: float

    def threshold(self, max_tokens: int) -> int:
        """New tokens up to which a step on demand is cheaper than a pass, as a worker finds it."""
        machine = self.machine
        rule = Threshold(
            "auto",
            self.work.routed,
            machine.link,
            self.resident_rate,
            max_tokens,
            machine.vram_bytes_s,
        )
        return rule.tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """The new tokens of a step or pass: how many, and how many k/v they attend to in all."""

    count: int = 0
    attended: int = 0

    def plus(self, cached: int, count: int) -> Tokens:
        attended = count * cached + count * (count + 1) // 2
        return Tokens(self.count + count, self.attended + attended)


def hit_rate(resident_rate: float, width: float) -> float:
    """Share of decoding rows' distinct experts that are in slots; `width`: how many times as many
    as one row has. The root lies between what two measurements ask for (H200, 16 layers of Qwen3's
    shape, temperature 1, LRU: 57 % of a quarter resident with 4 rows, 80 % of a half with 8)."""
    favourites = max(1.0, width) ** -0.5
    return resident_rate + (hit_rate_lru_stack(resident_rate) - resident_rate) * favourites


class CostedWorker:
    """Says what each plan costs. Remembers the open pass, whose tokens come with its first part.
    `num_parts`: into how many equal parts the scheduler may cut a pass."""

    def __init__(self, rig: Rig, num_parts: int) -> None:
        self._rig = rig
        self._num_parts = num_parts
        self._pass = Tokens()

    def cost(self, plan: StepPlan) -> tuple[float, StepStats]:
        """Seconds of the worker's time, and the statistics of the result."""
        if plan.mode is StepMode.PASS:
            return self._pass_part(plan)
        tokens = _tokens_of(plan.extends)
        context = sum(extend.cached_len for extend in plan.extends)
        decodes = unpack_ids(plan.decode_positions)
        for position in decodes:
            tokens = tokens.plus(position, 1)
            context += position
        return self._on_demand(tokens, len(decodes), context)

    def _on_demand(self, tokens: Tokens, num_decodes: int, context: int) -> tuple[float, StepStats]:
        """`context`: tokens whose k/v are read once."""
        work, machine, resident = self._rig.work, self._rig.machine, self._rig.resident_rate
        routed = work.routed
        distinct = distinct_uniform(routed, tokens.count)
        width = distinct_uniform(routed, num_decodes) / routed.top_k
        new_rate = 1 - num_decodes / tokens.count
        hit = new_rate * resident + (1 - new_rate) * hit_rate(resident, width)
        asked_bytes = routed.num_layers * distinct * routed.expert_bytes
        read_bytes = work.dense_bytes + asked_bytes + context * work.kv_token_bytes
        read_s = read_bytes / machine.vram_bytes_s
        compute_s = self._operations(tokens) / machine.operations_s
        here_s = routed.num_layers * LAYER_S + max(read_s, compute_s)
        seconds = on_demand_s(routed, machine.link, hit, distinct, here_s)
        asked = round(routed.num_layers * distinct)
        misses = round(asked * (1 - hit))
        stats = StepStats(
            step_us=round(seconds * 1e6),
            expert_bytes=misses * routed.expert_bytes,
            slot_hits=asked - misses,
            slot_misses=misses,
            distinct_experts=asked,
        )
        return seconds, stats

    def _pass_part(self, plan: StepPlan) -> tuple[float, StepStats]:
        work, machine, resident = self._rig.work, self._rig.machine, self._rig.resident_rate
        first, end = (0, self._num_parts) if plan.layers == (0, 0) else plan.layers
        if first == 0:
            self._pass = _tokens_of(plan.extends)
        share = (end - first) / self._num_parts
        num_layers = round(share * work.routed.num_layers)
        routed = replace(work.routed, num_layers=num_layers)
        compute_s = share * self._operations(self._pass) / machine.operations_s
        seconds = pass_s(routed, machine.link, resident, compute_s) + PASS_LAYER_S * num_layers
        moved = (1 - resident) * routed.bank_bytes
        return seconds, StepStats(step_us=round(seconds * 1e6), expert_bytes=round(moved))

    def _operations(self, tokens: Tokens) -> float:
        """Two for each weight and token, four for each element of a query and k/v attended to."""
        work, routed = self._rig.work, self._rig.work.routed
        active_bytes = (
            work.dense_bytes
            - work.head_bytes
            + routed.num_layers * routed.top_k * routed.expert_bytes
        )
        products = 2 * active_bytes / work.element_bytes * tokens.count
        attention = 4 * tokens.attended * work.query_width * work.num_attention_layers
        return products + attention


def _tokens_of(extends: tuple[Extend, ...]) -> Tokens:
    tokens = Tokens()
    for extend in extends:
        tokens = tokens.plus(extend.cached_len, len(extend.token_ids) // 4)
    return tokens
