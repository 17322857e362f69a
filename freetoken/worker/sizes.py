"""What the memory plan is made from: a model's sizes and what was asked for. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def num_all_experts(self) -> int:
        return self.num_moe_layers * self.num_experts

    def kv_token_bytes(self) -> int:
        """K/v of one token over all layers."""
        return sum(self.kv_widths) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """The flags, as given. `has_slots`: experts are computed from slots, not in place."""

    page_size: int
    max_rows: int
    max_step_tokens: int
    has_slots: bool = False
    context_tokens: int | None = None
    num_tokens: int | None = None
    num_pages: int | None = None
    kv_reserve_tokens: int | None = None
    max_seq_len_override: int | None = None
    moe_cache_size: int | None = None
    moe_cache_rate: float | None = None
    automatic_pool_tokens: int | None = None  # the automatic pool is no larger than needed for this
