"""A bound on the memory that one step on the CPU needs beside weights and k/v.

An upper bound, not an estimate: tensors that never live at the same time are added up, and all
intermediate numbers are counted in float32. Per token of a step and layer: the residual and its
normed copies, q, k, v and the attention output, the feed-forward or the sorted copies of the routed
experts' inputs, gates and outputs. Per sampled row: the logits and what the sampler makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.worker.sizes import ModelSizes

FLOAT_BYTES = 4
RESIDUAL_COPIES = 8  # residual, two norms in float32, attention and feed-forward outputs, sums
HEAD_COPIES = 4  # q before and after norm and rope, attention output before and after the merge
KV_COPIES = 2  # before and after norm and rope
FFN_COPIES = 3  # gate, up, their product
ROUTER_COPIES = 4  # logits, probabilities, their order
LOGIT_COPIES = 10  # raw, edited, scaled, weights, running sums in float64, sorted values and ids
SCORE_COPIES = 4  # before and after softcap, with the sink, probabilities
BIAS_MASKS = 3  # bool per query and key: causal, window, their negation
INDEX_BYTES = 32  # slots, positions, masks and bias of one gathered key
COUNT_BYTES = 5  # int32 count and bool per vocabulary entry of a row with penalties


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step: tokens of a forward, sampled rows, tokens of a pass (0: there are none)."""

    num_tokens: int
    num_rows: int
    num_pass_tokens: int


def price_activations(sizes: ModelSizes, step: StepSizes) -> dict[str, int]:
    """Bytes by name: `activations`, `decode_gather`, `sampling`, and `scores`, `pass` if needed."""
    prices = {
        "activations": step.num_tokens * price_token(sizes),
        "decode_gather": sizes.max_gathered_keys * (_price_key(sizes) + INDEX_BYTES),
        "sampling": price_sampling(sizes, step.num_rows),
    }
    if sizes.max_scores:
        prices["scores"] = sizes.max_scores * SCORE_COPIES * FLOAT_BYTES
    if step.num_pass_tokens:
        ids_and_positions = 3 * 8
        residuals = 2 * sizes.hidden_size * sizes.element_bytes
        prices["pass"] = step.num_pass_tokens * (residuals + ids_and_positions)
    return prices


def price_token(sizes: ModelSizes) -> int:
    """Bytes of one token's temporaries in the widest layer, all in float32."""
    expert_width = FFN_COPIES * sizes.expert_width + 2 * sizes.hidden_size
    widths = (
        RESIDUAL_COPIES * sizes.hidden_size
        + HEAD_COPIES * sizes.query_width
        + KV_COPIES * max(sizes.kv_widths)
        + max(FFN_COPIES * sizes.ffn_width, sizes.top_k * expert_width)
        + ROUTER_COPIES * sizes.num_experts
    )
    return widths * FLOAT_BYTES


def price_sampling(sizes: ModelSizes, num_rows: int) -> int:
    """Bytes of the logits of `num_rows` rows and of what the sampler makes of them."""
    return num_rows * sizes.vocab_size * (LOGIT_COPIES * FLOAT_BYTES + COUNT_BYTES)


def price_reach(sizes: ModelSizes, num_tokens: int) -> int:
    """Bytes per token that a row reaches back: its k/v gathered in one layer, and the bias of an
    extend of `num_tokens` with the masks it is made from."""
    return _price_key(sizes) + num_tokens * (sizes.element_bytes + BIAS_MASKS)


def _price_key(sizes: ModelSizes) -> int:
    """Bytes of the k/v of one token gathered in one layer; in float32 too where scores exist."""
    copies = sizes.element_bytes + (FLOAT_BYTES if sizes.max_scores else 0)
    return max(sizes.kv_widths) * copies
