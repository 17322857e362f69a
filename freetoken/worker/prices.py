"""What everything but slots costs in the memory plan: fixed parts, and k/v pages.

Called by memory.py. Pure. A GPU holds dense weights, the ring of the passes, scratch rows and
whatever steps need, while the banks with all experts lie in host memory; on the CPU all of it is
the same memory.
"""

from __future__ import annotations

from freetoken.worker.activations import StepSizes, price_activations, price_reach
from freetoken.worker.capacity import to_pages
from freetoken.worker.gpu_activations import MAX_ON_DEMAND_TOKENS, price_gpu, price_gpu_reach
from freetoken.worker.sizes import ModelSizes, Request

MAX_PASS_TOKENS = 32768
"""Tokens in one pass: tens of thousands, so that each expert crosses the link once for them."""
RING_LAYERS = 2
"""Layers whose experts the ring holds: one that computes, one that is being copied."""
EXPERT_TABLE_BYTES = 64
"""The device's book-keeping of one expert: its slot, priority, row, place in the lists."""
MIN_PAIRS = 1 << 16
"""As in experts/slots.py: pairs of token and expert for which there is room from the start."""
TABLE_ENTRY_BYTES = 4
HOST_PROCESS_BYTES = 2 << 30
"""The worker's own host memory beside the banks: Python, torch, CUDA's host side, staging."""
STANDBY_BYTES = 512 << 20
"""Of the worker that stands by: Python, torch, transformers and the compiler. Of its own it has
0.3 GiB where torch has no CUDA (2.13, 2026-12-01)."""


def pass_tokens(sizes: ModelSizes, request: Request, step_tokens: int) -> int:
    """The most tokens of a pass; 0 if there are none, as with experts in place."""
    if not (request.has_slots or sizes.on_gpu):
        return 0
    return max(step_tokens, MAX_PASS_TOKENS)


def price_fixed(sizes: ModelSizes, request: Request, step_tokens: int) -> dict[str, int]:
    """Bytes by name of all that does not depend on the sizes of pool and cache."""
    step = _largest_step(sizes, request, step_tokens)
    prices = {"weights": sizes.dense_bytes}
    if not sizes.on_gpu:
        prices["experts"] = sizes.bank_bytes
    prices["libraries"] = sizes.library_bytes
    layer_bytes = sizes.num_experts * sizes.expert_bytes
    if request.has_slots:
        # A step that needs more than the slots hold gets one layer's experts at a time.
        prices["scratch"] = layer_bytes
        prices["ring"] = RING_LAYERS * layer_bytes
        max_pairs = (MAX_ON_DEMAND_TOKENS + request.max_rows) * sizes.top_k
        prices["tables"] = sizes.num_all_experts * EXPERT_TABLE_BYTES
        prices["tables"] += max(MIN_PAIRS, max_pairs) * TABLE_ENTRY_BYTES
    prices |= (price_gpu if sizes.on_gpu else price_activations)(sizes, step)
    return prices if sizes.on_gpu else prices | _price_standby(request)


def _price_standby(request: Request) -> dict[str, int]:
    return {"standby": STANDBY_BYTES} if request.has_standby else {}


def _largest_step(sizes: ModelSizes, request: Request, step_tokens: int) -> StepSizes:
    # A chunk of a pass has no decode rows beside it.
    decode_rows = 0 if sizes.on_gpu else request.max_rows
    return StepSizes(
        num_tokens=step_tokens + decode_rows,
        num_rows=request.max_rows,
        num_pass_tokens=pass_tokens(sizes, request, step_tokens),
    )


def price_host(sizes: ModelSizes, request: Request) -> dict[str, int]:
    """Bytes by name in host memory for a model on a GPU."""
    prices = {"banks": sizes.bank_bytes, "process": HOST_PROCESS_BYTES}
    return prices | _price_standby(request)


class Pages:
    """The price of pages: their k/v, and what attention needs for a row that reaches this far: its
    k/v gathered in one layer at a time, and on the CPU the bias of an extend; on a GPU also the
    page table."""

    def __init__(self, sizes: ModelSizes, request: Request, window: int, step_tokens: int) -> None:
        self.page_bytes = sizes.kv_token_bytes() * request.page_size
        self._window_pages = to_pages(window, request.page_size)
        if sizes.on_gpu:
            step = _largest_step(sizes, request, step_tokens)
            self._reach_bytes = price_gpu_reach(sizes, step) * request.page_size
            self._reach_bytes += request.max_rows * TABLE_ENTRY_BYTES
        else:
            self._reach_bytes = price_reach(sizes, step_tokens) * request.page_size

    def price(self, num_pages: int) -> int:
        return sum(self.named(num_pages).values())

    def fitting(self, num_bytes: int) -> int:
        """The most pages whose price is at most `num_bytes`."""
        num_bytes = max(0, num_bytes - self.page_bytes)
        within = num_bytes // (self.page_bytes + self._reach_bytes)
        if within <= self._window_pages:
            return within
        return (num_bytes - self._window_pages * self._reach_bytes) // self.page_bytes

    def named(self, num_pages: int) -> dict[str, int]:
        """The sentinel page included."""
        return {
            "kv": (num_pages + 1) * self.page_bytes,
            "kv_reach": min(num_pages, self._window_pages) * self._reach_bytes,
        }
