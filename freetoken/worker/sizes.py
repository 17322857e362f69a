"""What the memory plan is made from: a model's sizes and what was asked for. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.config import Config

WINDOWS_IN_POOL = 4
TOKENS_PER_ROW = 2048
"""The automatic pool on a CPU holds this for every row, but no more than WINDOWS_IN_POOL windows:
more would be zeroed at start for nothing."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the plan needs of a model. Bytes are those of the loaded form."""

    window: int
    kv_widths: tuple[int, ...]  # elements of k and v of a token, per attention layer
    element_bytes: int  # of k, v and activations
    vocab_size: int
    hidden_size: int
    query_width: int  # elements of a token's queries in one layer
    ffn_width: int  # of the widest dense feed-forward, 0 if there is none
    expert_width: int  # of an expert's intermediate, 0 without experts
    num_moe_layers: int
    num_experts: int  # per layer
    top_k: int
    expert_bytes: int  # one expert of one layer
    dense_bytes: int  # all other weights
    max_gathered_keys: int  # of decode rows, in one layer at a time
    max_scores: int  # attention scores that exist at a time, 0 if they never do
    library_bytes: int  # what the libraries underneath keep for themselves
    on_gpu: bool = False
    head_size: int = 0  # elements of the widest key or value head
    is_tied: bool = False  # the output layer's weight is the embedding's

    @property
    def num_all_experts(self) -> int:
        return self.num_moe_layers * self.num_experts

    def kv_token_bytes(self) -> int:
        """K/v of one token over all layers."""
        return sum(self.kv_widths) * self.element_bytes

    @property
    def bank_bytes(self) -> int:
        """All experts of all layers."""
        return self.num_all_experts * self.expert_bytes

    @property
    def head_bytes(self) -> int:
        """The output layer's weight."""
        return self.vocab_size * self.hidden_size * self.element_bytes

    @property
    def step_weight_bytes(self) -> int:
        """Of `dense_bytes`, what every step reads: all but an embedding that is not the head."""
        return max(0, self.dense_bytes - (0 if self.is_tied else self.head_bytes))


@dataclass(frozen=True, slots=True)
class Request:
    """The flags, as given; None: the plan chooses.

    `has_slots`: experts are computed from slots, not in place · `max_step_tokens`: tokens computed
    at a time, on a GPU the chunk of a pass · `has_standby`: another worker waits
    for this one's end.
    """

    page_size: int
    max_rows: int
    max_step_tokens: int | None = None
    has_slots: bool = False
    has_standby: bool = False
    context_tokens: int | None = None
    num_tokens: int | None = None
    num_pages: int | None = None
    kv_reserve_tokens: int | None = None
    max_seq_len_override: int | None = None
    moe_cache_size: int | None = None
    moe_cache_rate: float | None = None
    automatic_pool_tokens: int | None = None  # the automatic pool is no larger than needed for this


def make_request(config: Config, sizes: ModelSizes, *, has_slots: bool) -> Request:
    """The flags of `config` that the plan needs."""
    window = config.max_seq_len_override or sizes.window
    cpu_pool_tokens = min(config.max_rows * TOKENS_PER_ROW, WINDOWS_IN_POOL * window)
    return Request(
        page_size=config.page_size,
        max_rows=config.max_rows,
        max_step_tokens=config.max_step_tokens,
        has_slots=has_slots,
        has_standby=config.worker_restarts > 0,
        context_tokens=config.context_tokens,
        num_tokens=config.num_tokens,
        num_pages=config.num_pages,
        kv_reserve_tokens=config.kv_reserve_tokens,
        max_seq_len_override=config.max_seq_len_override,
        moe_cache_size=config.moe_cache_size,
        moe_cache_rate=config.moe_cache_rate,
        automatic_pool_tokens=None if sizes.on_gpu else cpu_pool_tokens,
    )
