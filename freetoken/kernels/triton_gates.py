"""The device twin of gates.GateKind: from gate and up to what the down product takes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_value(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_SHIFT: tl.constexpr,
):
    """gate, up: fp32, of one shape; without a gate `gate` is the product and `up` unused."""
    if GATED:
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return activate(gate, ACTIVATION, ALPHA) * (up + UP_SHIFT)
    else:
        return activate(gate, ACTIVATION, ALPHA)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    if ACTIVATION == "swish":
        return x * tl.sigmoid(x * ALPHA)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 · (1 + tanh(u)) = sigmoid(2u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        kept = tl.maximum(x, 0.0)
        return kept * kept
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(x)
    elif ACTIVATION == "tanh":
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0
    else:
        return x
