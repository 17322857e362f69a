"""Loads a checkpoint: dense weights into the model on its device, experts into banks.

Banks that slots are filled from lie in one memory (experts/shared.py); whoever keeps it over the
end of this process has it passed in again, and what it holds is not read.
"""

from __future__ import annotations

import time
from pathlib import Path

from transformers import PreTrainedModel

from freetoken import log
from freetoken.errors import EngineError
from freetoken.experts.bank import RowBank
from freetoken.experts.pinning import Pinner
from freetoken.experts.shared import BankMemory
from freetoken.kernels.hugepages import collapse_in_background
from freetoken.model.assemble import ExpertsMode, Weights, assemble, own_banks
from freetoken.model.banks import BankKeeper, banks_in, identify_banks, open_banks
from freetoken.model.build import build_meta_model
from freetoken.model.checkpoint import list_tensors, read_config, resolve_dtype
from freetoken.model.conversion import LoadPlan, plan_loading
from freetoken.model.fill import Progress, fill_weights
from freetoken.model.heap import trim_heap
from freetoken.model.rope import check_rope
from freetoken.model.served import ServedModel
from freetoken.model.shape import ModelShape, measure_shape

_log = log.get(__name__)


def read_shape(path: Path, dtype: str) -> ModelShape:
    """The model's sizes from config.json alone, without reading weights.

    `dtype` is the option's value; "auto" takes the config's. Raises ConfigError.
    """
    config = read_config(path)
    return measure_shape(build_meta_model(config, resolve_dtype(path, config, dtype)))


def load_model(
    path: Path,
    *,
    dtype: str,
    device: str,
    experts: ExpertsMode,
    num_slots: int | None,
    progress: Progress,
    shape: ModelShape | None = None,
    context_tokens: int | None = None,
    use_kernels: bool | None = None,
    overlap_passes: bool = True,
    found: BankMemory | None = None,
    keeper: BankKeeper | None = None,
    host_free_bytes: int | None = None,
    pinner: Pinner | None = None,
) -> ServedModel:
    """The model, ready to run on `device`.

    `num_slots`: expert slots over all layers, for "slots" only. `progress(what, done, total)`
    is called with bytes of the checkpoint. `shape`: what `read_shape` said, if it was asked: to
    find it takes a second for 48 layers. `context_tokens`: the longest request that will be
    served, by default the model's window. `use_kernels`, `overlap_passes`: see assemble.

    For "slots" only: `found`: banks that an earlier worker left (`find_banks`); `keeper`: keeps
    new ones; `host_free_bytes`: what new ones may take, None: whatever they need; `pinner`: pins
    them for the device, and may have begun with `found`; None: made here for a GPU.

    Raises ConfigError for a bad directory or checkpoint or too little memory, EngineError for what
    cannot be served.
    """
    if (experts == "slots") != (num_slots is not None):
        raise EngineError(f"experts {experts} with num_slots {num_slots}: slots need a number")
    config = read_config(path)
    model = build_meta_model(config, resolve_dtype(path, config, dtype))
    shape = shape or measure_shape(model)
    check_rope(model, context_tokens or shape.window)
    plan = plan_loading(model, list_tensors(path))
    memory = None
    if experts == "slots":
        memory = open_banks(identify_banks(path, model, device), found, keeper, host_free_bytes)
        if pinner is not None and found is not None and memory is not found:
            raise EngineError(f"the files in {path} have changed while this worker was starting")
    make_bank = own_banks(experts) if memory is None else banks_in(memory)
    weights = Weights(model, experts, device, make_bank)
    if pinner is None and memory is not None and device != "cpu":
        pinner = Pinner()
    _fill(plan, model, weights, memory, pinner, progress)
    weights.finish(plan.missing)
    if memory is not None:
        memory.close()  # what keeps it has a descriptor of its own
    served = assemble(
        model,
        shape,
        weights,
        device=device,
        num_slots=num_slots,
        context_tokens=context_tokens or shape.window,
        overlap_passes=overlap_passes,
        use_kernels=use_kernels,
    )
    trim_heap()
    collapse_in_background(served.memory)
    return served


def _fill(
    plan: LoadPlan,
    model: PreTrainedModel,
    weights: Weights,
    memory: BankMemory | None,
    pinner: Pinner | None,
    progress: Progress,
) -> None:
    """Read what is not there, and pin each layer as soon as it is."""
    started_s = time.monotonic()
    if memory is None or pinner is None:
        num_bytes = fill_weights(plan, model, weights, memory, progress)
        _log_read(num_bytes, started_s)
        return
    with pinner:
        give_filled(pinner, memory)
        num_bytes = fill_weights(
            plan, model, weights, memory, progress, lambda i: pinner.give(i, memory.rows(i))
        )
        _log_read(num_bytes, started_s)
        progress("pinning the expert banks", num_bytes, num_bytes)
        pinner.finish([bank for bank in weights.banks.values() if isinstance(bank, RowBank)])


def give_filled(pinner: Pinner, memory: BankMemory) -> None:
    """Let layers be pinned that are there already."""
    for layer in range(len(memory.identity.layers)):
        if memory.is_filled(layer):
            pinner.give(layer, memory.rows(layer))


def _log_read(num_bytes: int, started_s: float) -> None:
    _log.info(log.event("weights.read", bytes=num_bytes, seconds=time.monotonic() - started_s))
