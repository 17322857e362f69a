"""A bound on the temporaries of steps and passes on a GPU, in bytes.

Like activations.py, but for the GPU's path: attention needs no bias and gathers k/v of one row at a
time, a pass is cut into chunks of which only the residual exists for all tokens, and a step on
demand is small and lives in the memory of the CUDA graphs. Tensors of one phase of a layer
(attention, feed-forward) are added up, phases follow each other.
"""

from __future__ import annotations

from freetoken.worker.activations import (
    FLOAT_BYTES,
    StepSizes,
    price_sampling,
    price_token,
)
from freetoken.worker.sizes import ModelSizes

MAX_ON_DEMAND_TOKENS = 256
"""The most extend tokens of a step on demand: the largest graph."""
ATTENTION_SPLITS = 64
"""Parts into which a decode row's context may be split, for the few tokens of a small step."""
SPLIT_TOKENS = 64
"""Tokens of a step up to which its rows are split that far; beyond, the parts become fewer."""
NUM_GRAPHS = 12
GRAPH_LAYER_BYTES = 256 << 10
"""What the driver keeps for one layer of one captured graph, some 20 kernel nodes."""

NORM_FLOATS = 3  # float32 copies of the input of a norm: itself, its square, the product
RESIDUALS = 3  # the embeddings, a layer's input, its output
NORM_COPIES = 5  # typed: normed inputs, residual sums, a layer's output
INDEX_BYTES = 16  # slot and position of a gathered key
PAIR_BYTES = 48  # sorting (token, expert) pairs: ids, order, offsets in int64
ROUTER_FLOATS = 4  # logits, probabilities, their order
GATE_COPIES = 6  # of an expert's widest intermediate: gate, up, clamped, activated, product
ROPE_KINDS = 2


def price_gpu(sizes: ModelSizes, step: StepSizes) -> dict[str, int]:
    """Bytes by name: `activations` of a chunk of `step.num_tokens` (rows included), `graphs` of
    steps on demand, `sampling`, and the `pass`'s residual."""
    num_layers = len(sizes.kv_widths)
    num_on_demand = MAX_ON_DEMAND_TOKENS + step.num_rows
    split_parts = min(num_on_demand, SPLIT_TOKENS) * ATTENTION_SPLITS
    return {
        "activations": max(
            step.num_tokens * _price_chunk_token(sizes),
            step.num_pass_tokens * _price_norm(sizes),
        ),
        "graphs": num_on_demand * price_token(sizes)
        + (split_parts + num_on_demand) * sizes.query_width * FLOAT_BYTES
        + NUM_GRAPHS * num_layers * GRAPH_LAYER_BYTES,
        "sampling": price_sampling(sizes, step.num_rows),
        "pass": step.num_pass_tokens * _price_pass_token(sizes),
    }


def price_gpu_reach(sizes: ModelSizes) -> int:
    """Bytes per token that a row reaches back: its k/v gathered in one layer of a pass."""
    return max(sizes.kv_widths) * sizes.element_bytes + INDEX_BYTES


def _price_norm(sizes: ModelSizes) -> int:
    """One token in a norm over the hidden size."""
    return sizes.hidden_size * (NORM_FLOATS * FLOAT_BYTES + sizes.element_bytes)


def _price_pass_token(sizes: ModelSizes) -> int:
    """What exists of each token of a pass as long as it is open."""
    rope = ROPE_KINDS * 2 * sizes.head_size * (FLOAT_BYTES + sizes.element_bytes)
    ids_positions_rows = 4 * 8
    return RESIDUALS * sizes.hidden_size * sizes.element_bytes + rope + ids_positions_rows


def _price_chunk_token(sizes: ModelSizes) -> int:
    """One token of a chunk in the widest layer."""
    typed = sizes.element_bytes
    common = _price_norm(sizes) + NORM_COPIES * sizes.hidden_size * typed
    # The joint projection, its parts normed (in float32) and turned, attention's output twice.
    floats = NORM_FLOATS * FLOAT_BYTES
    query = sizes.query_width * (floats + 6 * typed)
    key = max(sizes.kv_widths) * (floats + 4 * typed)
    dense = 3 * sizes.ffn_width * typed
    return common + max(query + key, dense + _price_routed(sizes))


def _price_routed(sizes: ModelSizes) -> int:
    """The sorted copies of one token's K experts: input, gate and up, product, output and its
    weighted float32 form; and the sum over K."""
    typed = sizes.element_bytes
    pair = (
        sizes.hidden_size * (2 * typed + FLOAT_BYTES)
        + GATE_COPIES * sizes.expert_width * typed
        + PAIR_BYTES
    )
    summed = sizes.hidden_size * (FLOAT_BYTES + typed)
    router = ROUTER_FLOATS * sizes.num_experts * FLOAT_BYTES
    return sizes.top_k * pair + (summed if sizes.top_k else 0) + router
