"""Where the worker's model comes from: checkpoint.CheckpointSource, or a test's fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from freetoken.model.context import KvPools
from freetoken.worker.model import Model
from freetoken.worker.sizes import ModelSizes

ExpertsMode = Literal["in-place", "slots"]
ReportBytes = Callable[[str, int, int], None]


class ModelSource(Protocol):
    """`device`: where the model computes."""

    @property
    def device(self) -> torch.device: ...

    def read_sizes(self) -> ModelSizes:
        """From the configuration alone."""
        ...

    def find_banks(self, experts: ExpertsMode) -> int:
        """Bytes of banks that an earlier worker left and `load` will use; 0: none."""
        ...

    def check(self, experts: ExpertsMode) -> None:
        """EngineError if a small copy of the model computes something wrong on our path."""
        ...

    def load(
        self,
        experts: ExpertsMode,
        num_slots: int | None,
        context_tokens: int,
        report: ReportBytes,
    ) -> Model:
        """`context_tokens`: the longest request that will be served."""
        ...

    def make_pools(self, num_pages: int, page_size: int) -> KvPools: ...
