"""What is built: the recipe of a demo checkpoint, as plain data with a name in the cache.

The demo is a real 135M instruct model with replicated experts and fitted routers, not a trained
MoE. Knows no file but the packaged routers, and no tensor. Torch-free: a cached checkpoint is found
in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable

RECIPE_VERSION = 1
"""Raised whenever the same recipe gives other files, so that old caches are not taken for new."""

WHAT_IT_IS = (
    "a real 135M instruct model with replicated experts and fitted routers, not a trained MoE"
)

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


class Form(StrEnum):
    """The architecture that is written; the value is transformers' `model_type`."""

    QWEN3_MOE = "qwen3_moe"
    MIXTRAL = "mixtral"
    LLAMA = "llama"  # the dense source itself


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the dense source model."""

    num_layers: int
    hidden: int
    expert_hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rope_theta: float
    rms_eps: float


SMOLLM2_135M = Shape(
    num_layers=30,
    hidden=576,
    expert_hidden=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    context_tokens=8192,
    rope_theta=1e5,
    rms_eps=1e-5,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """`noise`: standard deviation of what is added to each expert tensor, relative to its own."""

    form: Form = Form.QWEN3_MOE
    dtype: str = "bfloat16"
    noise: float = 0.01
    seed: int = 0
    num_experts: int = 8
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if self.noise < 0:
            raise ValueError(f"noise {self.noise} is negative")

    @property
    def is_moe(self) -> bool:
        return self.form is not Form.LLAMA

    @property
    def model_name(self) -> str:
        """The directory's own name, which servers show to clients."""
        if not self.is_moe:
            return "smollm2-135m"
        return f"smollm2-135m-{self.num_experts}x{self.experts_per_token}"

    def directory_name(self, source_sha256: str) -> str:
        """Differs whenever source, routers, recipe or RECIPE_VERSION do."""
        routers = hashlib.sha256(router_file().read_bytes()).hexdigest() if self.is_moe else ""
        facts = [RECIPE_VERSION, source_sha256, routers, asdict(self)]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return f"{self.form}-{self.dtype}-{digest[:12]}"

    def checkpoint_bytes(self, shape: Shape) -> int:
        """Size of the tensors, to a few kilobytes (norms are left out)."""
        copies = self.num_experts if self.is_moe else 1
        router = self.num_experts * shape.hidden if self.is_moe else 0
        heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
        layer = (
            heads * shape.head_dim * shape.hidden
            + copies * 3 * shape.hidden * shape.expert_hidden
            + router
        )
        return DTYPE_BYTES[self.dtype] * (
            shape.vocab_size * shape.hidden + shape.num_layers * layer
        )


def router_file() -> Traversable:
    """Fitted routers, safetensors: `layers.{i}`: [8, 576] bf16.

    Spherical k-means over the dense model's hidden states on documentation text, in the complement
    of their mean, balanced through a bias along the mean.
    """
    return resources.files("freetoken.demo") / "router_8x2.safetensors"
