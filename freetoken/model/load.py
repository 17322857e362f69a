"""Loads a checkpoint: dense weights into the model, experts into banks, one at a time.

Never holds more than the banks, the dense weights and the mapped shards. transformers' bulk loader
would queue every tensor and stack whole layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from freetoken.errors import ConfigError, EngineError
from freetoken.kernels.hugepages import collapse_in_background
from freetoken.model.assemble import ExpertsMode, Weights, assemble, own_banks
from freetoken.model.build import build_meta_model
from freetoken.model.checkpoint import TensorReader, list_tensors, read_config, resolve_dtype
from freetoken.model.conversion import (
    BankTarget,
    DtypePlan,
    LoadPlan,
    Task,
    convert,
    plan_loading,
    read_sources,
)
from freetoken.model.heap import trim_heap
from freetoken.model.rope import check_rope
from freetoken.model.served import ServedModel
from freetoken.model.shape import ModelShape, measure_shape

Progress = Callable[[str, int, int], None]
# Converted tensors live between banks and are freed at once; glibc keeps the holes.
TRIM_BYTES = 256 << 20


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
    context_tokens: int | None = None,
) -> ServedModel:
    """The model, ready to run on `device`.

    `num_slots`: expert slots over all layers, for "slots" only. `progress("loading", done, total)`
    is called with bytes of the checkpoint. `context_tokens`: the longest request that will be
    served, by default the model's window. Raises ConfigError for a bad directory or checkpoint,
    EngineError for what cannot be served.
    """
    if (experts == "slots") != (num_slots is not None):
        raise EngineError(f"experts {experts} with num_slots {num_slots}: slots need a number")
    config = read_config(path)
    model = build_meta_model(config, resolve_dtype(path, config, dtype))
    shape = measure_shape(model)
    check_rope(model, context_tokens or shape.window)
    plan = plan_loading(model, list_tensors(path))
    weights = Weights(model, experts, device, own_banks(experts))
    _read_weights(plan, model, weights, progress)
    weights.finish(plan.missing)
    served = assemble(
        model,
        shape,
        weights,
        device=device,
        num_slots=num_slots,
        context_tokens=context_tokens or shape.window,
    )
    trim_heap()
    collapse_in_background(served.memory)
    return served


def _read_weights(
    plan: LoadPlan, model: PreTrainedModel, weights: Weights, progress: Progress
) -> None:
    reader = TensorReader()
    dtypes = DtypePlan(model)
    done, total, untrimmed = 0, plan.num_bytes, 0
    progress("loading", done, total)
    for task in plan.tasks:
        dtype = dtypes.of(task.target)
        if task.bank is None:
            for name, tensor in convert(task, read_sources(task, reader, dtype), model).items():
                weights.put(name, tensor)
        else:
            _fill_bank(task, task.bank, reader, model, weights, dtype)
        untrimmed += task.num_bytes
        if untrimmed >= TRIM_BYTES:
            trim_heap()
            untrimmed = 0
        done += task.num_bytes
        progress("loading", done, total)


def _fill_bank(
    task: Task,
    bank: BankTarget,
    reader: TensorReader,
    model: PreTrainedModel,
    weights: Weights,
    dtype: torch.dtype,
) -> None:
    """Fill one expert, or all experts of a stacked tensor, one after the other."""
    if task.expert is not None:
        converted = convert(task, read_sources(task, reader, dtype), model)
        weights.put_expert(bank, task.expert, _rows(task, converted, 1)[0])
        return
    sources = [stored for group in task.sources.values() for stored in group]
    if any(stored.shape[:1] != (bank.num_experts,) for stored in sources):
        converted = convert(task, read_sources(task, reader, dtype), model)
        for expert, row in enumerate(_rows(task, converted, bank.num_experts)):
            weights.put_expert(bank, expert, row)
        return
    for expert in range(bank.num_experts):
        part = read_sources(task, reader, dtype, (expert, expert + 1))
        weights.put_expert(bank, expert, _rows(task, convert(task, part, model), 1)[0])


def _rows(task: Task, converted: dict[str, torch.Tensor], num_rows: int) -> torch.Tensor:
    tensor = converted.get(task.target)
    if tensor is None or tensor.shape[0] != num_rows:
        raise ConfigError(
            f"the checkpoint's tensors for {task.target} do not give {num_rows} experts: "
            f"{ {name: tuple(t.shape) for name, t in converted.items()} }"
        )
    return tensor
