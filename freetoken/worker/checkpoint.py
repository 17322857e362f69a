"""The ModelSource of production: a checkpoint directory, through the model room."""

from __future__ import annotations

from pathlib import Path

import torch

from freetoken import log
from freetoken.experts.pinning import Pinner
from freetoken.experts.shared import BankMemory
from freetoken.model.banks import BankKeeper, find_banks
from freetoken.model.context import KvPools
from freetoken.model.load import give_filled, load_model, read_shape
from freetoken.model.scores import MAX_SCORES
from freetoken.model.selfcheck import check_model
from freetoken.model.served import ServedModel
from freetoken.model.shape import ModelShape
from freetoken.model.step import MAX_GATHERED_KEYS
from freetoken.worker.budget import measure_budget
from freetoken.worker.kv import allocate_pools
from freetoken.worker.sizes import ModelSizes
from freetoken.worker.source import ExpertsMode, ReportBytes

CPU_LIBRARY_BYTES = 512 << 20
"""oneDNN keeps a compiled primitive for each shape it has met, at most 1024: 500 MiB after prompts
of 23 lengths on the demo model, and hardly more with further ones (Zen 5, torch 2.13, 2026-12-01).
"""
GPU_LIBRARY_BYTES = 512 << 20
"""cuBLAS keeps a workspace of 32 MiB for each stream, and the driver the code of every kernel that
was loaded: most of them are loaded only when they are first called, after the budget was measured.
"""


_log = log.get(__name__)


class CheckpointSource:
    """`dtype` is the option's value; `keeper` keeps the banks for the next worker;
    `overlap_passes`: see assemble.

    Raises ConfigError for a directory that is no checkpoint.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        device: torch.device,
        keeper: BankKeeper | None = None,
        *,
        overlap_passes: bool = True,
    ) -> None:
        self._overlap_passes = overlap_passes
        self._keeper = keeper
        self._found: BankMemory | None = None
        self._pinner: Pinner | None = None
        self._path = path
        self._dtype = dtype
        self._device = device
        self._shape = read_shape(path, dtype)

    @property
    def device(self) -> torch.device:
        return self._device

    def read_sizes(self) -> ModelSizes:
        return sizes_of(self._shape, on_gpu=self._device.type == "cuda")

    def find_banks(self, experts: ExpertsMode) -> int:
        if experts == "slots" and self._keeper is not None:
            self._found = find_banks(self._path, self._dtype, str(self._device), self._keeper)
        return 0 if self._found is None else self._found.taken_bytes

    def check(self, experts: ExpertsMode) -> None:
        if self._found is not None and self._device.type == "cuda":
            self._pinner = Pinner()
            give_filled(self._pinner, self._found)  # beside what comes next
        if self._found is not None and self._found.is_whole:
            _log.info(log.event("check.known", why="the worker that filled these banks passed it"))
            return
        check_model(self._path, experts=experts, dtype=self._dtype, device=str(self._device))

    def load(
        self,
        experts: ExpertsMode,
        num_slots: int | None,
        context_tokens: int,
        report: ReportBytes,
    ) -> ServedModel:
        found, self._found = self._found, None
        return load_model(
            self._path,
            dtype=self._dtype,
            device=str(self._device),
            experts=experts,
            num_slots=num_slots,
            shape=self._shape,
            context_tokens=context_tokens,
            progress=report,
            overlap_passes=self._overlap_passes,
            found=found,
            keeper=self._keeper,
            host_free_bytes=measure_budget(),
            pinner=self._pinner,
        )

    def make_pools(self, num_pages: int, page_size: int) -> KvPools:
        return allocate_pools(
            self._shape.kv,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self._shape.dtype,
            device=self._device,
        )


def sizes_of(shape: ModelShape, *, on_gpu: bool) -> ModelSizes:
    """The numbers of the memory plan."""
    element_bytes = shape.dtype.itemsize
    # Two matrices at least: one expert's intermediate is no wider than this.
    widest = shape.expert_bytes // (2 * shape.hidden_size * element_bytes)
    return ModelSizes(
        window=shape.window,
        kv_widths=tuple(heads.num_kv_heads * (heads.k_dim + heads.v_dim) for heads in shape.kv),
        element_bytes=element_bytes,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        query_width=shape.query_width,
        ffn_width=shape.linear_width,
        expert_width=widest,
        num_moe_layers=shape.num_moe_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        expert_bytes=shape.expert_bytes,
        dense_bytes=shape.dense_bytes + (0 if on_gpu else shape.tied_head_bytes),
        max_gathered_keys=0 if on_gpu else MAX_GATHERED_KEYS,
        max_scores=MAX_SCORES if shape.has_scores and not on_gpu else 0,
        library_bytes=GPU_LIBRARY_BYTES if on_gpu else CPU_LIBRARY_BYTES,
        on_gpu=on_gpu,
        head_size=max(max(heads.k_dim, heads.v_dim) for heads in shape.kv),
        is_tied=shape.tied_head_bytes > 0,
    )
