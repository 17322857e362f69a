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
SPLIT_LINES = 2 * 192 * 128
"""Partial results of attention on demand: two programs for each multiprocessor, of (token, head)
lines, where rows are split so that all have work."""
NUM_GRAPHS = 12
GRAPH_LAYER_BYTES = 256 << 10
"""What the driver keeps for one layer of one captured graph, some 20 kernel nodes."""

NORM_FLOATS = 2  # float32 copies in a norm: of its input, and its square or the product
RESIDUALS = 3  # the embeddings, a layer's input, its output
LOGIT_FLOATS = 3  # float32 logits in a graph, those it leaves behind, the sampler's
NORM_COPIES = 5  # typed: normed inputs, residual sums, a layer's output
SLOT_BYTES = 4  # where a gathered key lies
MAX_KEPT_ROWS = 16
"""As in model/device_attention.py: rows of a pass for which that is kept, beside one more."""
PAIR_BYTES = 48  # sorting (token, expert) pairs: ids, order, offsets in int64
ROUTER_FLOATS = 4  # logits, probabilities, their order
GATE_COPIES = 4  # of an expert's widest intermediate: gate, up, their product, one more
ROPE_KINDS = 2


def price_gpu(sizes: ModelSizes, step: StepSizes) -> dict[str, int]:
    """Bytes by name: `activations` of a chunk of `step.num_tokens` (rows included), `graphs` of
    steps on demand, `sampling`, and the `pass`'s residual."""
    num_layers = len(sizes.kv_widths)
    num_on_demand = MAX_ON_DEMAND_TOKENS + step.num_rows
    return {
        "activations": max(
            step.num_tokens * _price_chunk_token(sizes),
            step.num_pass_tokens * _price_norm(sizes),
        ),
        "graphs": num_on_demand * price_token(sizes)
        + SPLIT_LINES * (sizes.head_size + 1) * FLOAT_BYTES
        + step.num_rows * sizes.vocab_size * (sizes.element_bytes + LOGIT_FLOATS * FLOAT_BYTES)
        + NUM_GRAPHS * num_layers * GRAPH_LAYER_BYTES,
        "sampling": price_sampling(sizes, step.num_rows),
        "pass": step.num_pass_tokens * _price_pass_token(sizes),
    }


def price_gpu_reach(sizes: ModelSizes, step: StepSizes) -> int:
    """Bytes per token that a row reaches back: its k/v gathered in one layer of a pass, and for
    every row where they lie."""
    num_rows = min(step.num_rows, MAX_KEPT_ROWS + 1)
    return max(sizes.kv_widths) * sizes.element_bytes + num_rows * SLOT_BYTES


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
    """The sorted copies of one token's K experts: input, gate and up, product, output; and the sum
    over K."""
    typed = sizes.element_bytes
    pair = (2 * sizes.hidden_size + GATE_COPIES * sizes.expert_width) * typed + PAIR_BYTES
    summed = sizes.hidden_size * (FLOAT_BYTES + typed)
    router = ROUTER_FLOATS * sizes.num_experts * FLOAT_BYTES
    return sizes.top_k * pair + (summed if sizes.top_k else 0) + router
