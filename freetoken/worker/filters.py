"""Penalties: what changes logits before anything is drawn from them (kernels/sample_ops.py).

The order is transformers': logit bias, repetition penalty, (presence and frequency penalties, which
it does not have), min_tokens; then what sampling itself does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Per row, [m] each; repetition 1 and the others 0 change nothing."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def penalize(logits: Tensor, counts: Tensor, in_prompt: Tensor, penalties: Penalties) -> Tensor:
    """logits [m, V] f32 after the penalties.

    counts: [m, V] int32, how often each token stands in the output · in_prompt: [m, V] bool.
    Repetition divides positive logits and multiplies negative ones, over prompt and output.
    """
    in_output = counts > 0
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(in_output | in_prompt, repeated, logits)
    return logits - penalties.frequency[:, None] * counts - penalties.presence[:, None] * in_output
