"""Regional compilation: one decoder layer is compiled, and the result serves all layers of a kind.

What differs between layers is tensors (weights, the seat of model/ops.py), so torch.compile finds
its code again for each of them. The number of tokens is dynamic; one token has code of its own.
Compiled code is kept in the user's cache: a second start takes seconds.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from freetoken.model.decoder import LayerProxy

MAX_KINDS = 64
"""Compiled forms of a layer: kinds of layers, times one or several tokens, times models."""

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class CompiledModule(LayerProxy):
    """A module that runs as compiled code: a decoder layer, or what stands beside the layers."""

    def __init__(self, module: nn.Module, run_one: Run, run_many: Run) -> None:
        super().__init__(module)
        self._run_one = run_one
        self._run_many = run_many

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden: [1, T, C]."""
        num_tokens = hidden.shape[1]
        if num_tokens == 1:
            return self._run_one(self._layer, (hidden, *args), kwargs)
        _mark((hidden, args, kwargs), num_tokens)
        return self._run_many(self._layer, (hidden, *args), kwargs)


def make_compiler(
    backend: str | Callable[..., Any] = "inductor",
) -> Callable[[nn.Module], CompiledModule]:
    """Wraps modules, which are compiled on first use; those that are alike share compiled code."""
    options: dict[str, Any] | None = None
    tuned: dict[str, Any] | None = None
    if backend == "inductor":
        use_cache()
        options = _options()
        tuned = options | {"coordinate_descent_tuning": True} | _kept_tuning()
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, MAX_KINDS)
    # Only what _mark marks is dynamic: not what differs between two models, or kinds of layers.
    settings.automatic_dynamic_shapes = False
    settings.automatic_dynamic_local_pgo = False
    run_one = torch.compile(_run_one, fullgraph=True, backend=backend, options=tuned)
    run_many = torch.compile(_run_many, fullgraph=True, backend=backend, options=options)
    return lambda module: CompiledModule(module, run_one, run_many)


def load_compiler() -> None:
    """Import what compile_layers needs, and find what names its cache: some 3 s, without a GPU.

    What fails here fails again when layers are compiled, and is told then.
    """
    with suppress(Exception):
        use_cache()
        for name in ("torch._inductor.compile_fx", "freetoken.model.graph_passes"):
            importlib.import_module(name)
        from torch._inductor.codecache import torch_key
        from torch._inductor.runtime.triton_compat import triton_key

        torch_key()
        triton_key()


def use_cache() -> None:
    """Let compiled code be kept in the user's cache, unless the environment says where."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # inductor itself puts its default there, a directory below /tmp, once it has been loaded.
    if os.environ.get(CACHE_VARIABLE) in (None, "", default_cache_dir()):
        home = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(home) if home.startswith("/") else Path.home() / ".cache"
        os.environ[CACHE_VARIABLE] = str(base / "freetoken" / "inductor")


def _options() -> dict[str, Any]:
    from freetoken.model.graph_passes import LayerPasses  # loads inductor

    return {"post_grad_custom_pre_pass": LayerPasses()}


def _kept_tuning() -> dict[str, Any]:
    """Options with which a later process finds what tuning has found.

    Before 2.13, kernels that torch starts itself, without Triton's launcher, are tuned again by
    each process if they had one form to begin with: 5 s at every start.
    """
    from torch._inductor import config

    if TorchVersion(torch.__version__) >= "2.13":
        return {}
    known = config.get_config_copy()
    names = ("use_static_cuda_launcher", "use_static_triton_launcher")
    return {name: False for name in names if name in known}


# What torch.compile traces: two functions, as it finds code again by function.
# Tuned, products of one token become reductions that inductor fuses and tunes: 0.61 ms instead of
# 0.72 for what is not attention or experts in 16 layers of Qwen3-30B-A3B's shape, but 0.83 instead
# of 0.78 for 8 tokens (H200, torch 2.11, 2026-12-01).
def _run_one(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _contiguous(layer(*args, **kwargs))


def _run_many(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _contiguous(layer(*args, **kwargs))


def _contiguous(value: Any) -> Any:
    """Rotary embeddings may come transposed (gpt_oss in transformers 5.17), and their strides would
    tell a part of a pass from a whole step: the layers would be compiled for each anew."""
    if isinstance(value, torch.Tensor):
        return value.contiguous()
    if isinstance(value, tuple):
        return tuple(_contiguous(item) for item in value)
    return value


def _mark(value: Any, num_tokens: int) -> None:
    """Say which dimensions are the tokens, before torch.compile takes a first size for constant."""
    if isinstance(value, torch.Tensor):
        for dim, size in enumerate(value.shape[:2]):
            if size == num_tokens and (dim == 1 or value.dim() == 1):
                torch._dynamo.maybe_mark_dynamic(value, dim)
    elif isinstance(value, tuple | list):
        for item in value:
            _mark(item, num_tokens)
    elif isinstance(value, dict):
        for item in value.values():
            _mark(item, num_tokens)
