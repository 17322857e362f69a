"""Small routed-experts problems: weights inside rows, routings with padding, gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from freetoken.experts.bank import allocate_rows, row_views
from freetoken.experts.layout import ExpertLayout
from freetoken.kernels.expert_inputs import Routing
from freetoken.kernels.gates import GateKind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)

SWIGLU = GateKind("swish")
GATES = {
    "swiglu": SWIGLU,
    "interleaved": GateKind("gelu", interleaved=True),
    "clamped": GateKind("swish", interleaved=True, alpha=1.702, limit=0.7, up_shift=1.0),
    "ungated": GateKind("relu2", is_gated=False),
}


@dataclass(frozen=True)
class Case:
    """T tokens, E experts, K a token, C hidden, F expert hidden."""

    num_tokens: int = 3
    num_experts: int = 5
    top_k: int = 2
    hidden: int = 24
    expert_hidden: int = 20
    has_bias: bool = False
    gate: GateKind | Callable[[torch.Tensor], torch.Tensor] = SWIGLU
    is_gated: bool = True
    dtype: torch.dtype = torch.float32

    def views(self, num_rows: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        width = self.expert_hidden * (2 if self.is_gated else 1)
        shapes: dict[str, tuple[int, ...]] = {
            "up": (width, self.hidden),
            "down": (self.hidden, self.expert_hidden),
        }
        if self.has_bias:
            shapes |= {"up_bias": (width,), "down_bias": (self.hidden,)}
        layout = ExpertLayout.plan(shapes, self.dtype)
        views = row_views(layout, allocate_rows(num_rows, layout.row_bytes, DEVICE))
        for view in views.values():
            scale = view.shape[-1] ** -0.5 if view.dim() == 3 else 1.0
            view.copy_(torch.randn(view.shape, generator=generator) * scale)
        return views

    def tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        hidden = torch.randn(self.num_tokens, self.hidden, generator=generator)
        return hidden.to(DEVICE, self.dtype)

    def routing(self, low: int = 0, num_tokens: int | None = None) -> Routing:
        """A token's experts are distinct, of [low, E − low): with low < 0 some are skipped."""
        generator = torch.Generator().manual_seed(3)
        scores = torch.rand(self.num_tokens, self.num_experts - 2 * low, generator=generator)
        ids = scores.argsort(1)[:, : self.top_k] + low
        weights = torch.rand(self.num_tokens, self.top_k, generator=generator)
        count = None if num_tokens is None else torch.tensor([num_tokens], dtype=torch.int32)
        return Routing(
            ids.to(DEVICE), weights.to(DEVICE), None if count is None else count.to(DEVICE)
        )

    def compare(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        """The reference rounds after each product, kernels round the inputs of the next one."""
        assert got.dtype == self.dtype
        tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[self.dtype]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not pytest.importorskip("triton").knobs.runtime.interpret,
    reason="triton's interpreter is off",
)
