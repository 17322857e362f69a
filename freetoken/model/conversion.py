"""Which checkpoint tensors make which model tensors, decided before any weight is read.

Applies transformers' own conversion mapping (renamings and fusions) to the checkpoint's keys, but
groups expert weights by expert, so that a bank is filled one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from freetoken.errors import ConfigError
from freetoken.model.checkpoint import FLOAT_DTYPES, StoredTensor
from freetoken.model.experts import bank_parameters, experts_modules, num_experts
from freetoken.model.tensors import TensorReader

# Old checkpoints carry these; the model computes them.
IGNORED_KEYS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
MAX_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class BankTarget:
    """An expert parameter of the model: `[E, …]`, one row per expert goes to a bank."""

    module_name: str
    parameter_name: str
    num_experts: int


@dataclass(slots=True)
class Task:
    """Makes one model tensor, or one expert's part of it.

    sources: the checkpoint tensors by the converter's source pattern, in order ·
    expert: whose part; None: a dense tensor, or all experts stacked.
    """

    target: str
    converter: WeightConverter | None
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)
    bank: BankTarget | None = None
    expert: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for group in self.sources.values() for stored in group)

    @property
    def first_file(self) -> str:
        return min(str(stored.file) for group in self.sources.values() for stored in group)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Tasks in the order of shards; `missing`: tensors to be tied or computed instead."""

    tasks: tuple[Task, ...]
    missing: frozenset[str]

    @property
    def num_bytes(self) -> int:
        return sum(task.num_bytes for task in self.tasks)


def bank_targets(model: PreTrainedModel) -> dict[str, BankTarget]:
    """The expert parameters of the model by their names."""
    return {
        f"{name}.{key}": BankTarget(name, key, num_experts(module))
        for name, module in experts_modules(model)
        for key in bank_parameters(module)
    }


def plan_loading(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> LoadPlan:
    """Raises ConfigError for tensors that are missing, unexpected or of an unsupported type."""
    return _Planner(model).plan(stored)


def convert(
    task: Task, tensors: Mapping[str, list[torch.Tensor]], model: PreTrainedModel
) -> dict[str, torch.Tensor]:
    """Run the task's converter over its source tensors; the result by model tensor name."""
    if task.converter is None:
        return {task.target: next(iter(tensors.values()))[0]}
    converter = deepcopy(task.converter)
    for pattern, group in tensors.items():
        for tensor in group:
            # transformers passes futures, callables or, as here, the tensor itself.
            converter.add_tensor(task.target, task.target, pattern, cast(Any, tensor))
    try:
        result = converter.convert(task.target, model=model, config=model.config)
    except Exception as error:
        raise ConfigError(
            f"cannot convert the checkpoint's tensors to {task.target}: {error}"
        ) from (error)
    return {name: t[0] if isinstance(t, list) else t for name, t in result.items()}


def read_sources(
    task: Task, reader: TensorReader, dtype: torch.dtype, rows: tuple[int, int] | None = None
) -> dict[str, list[torch.Tensor]]:
    """The task's source tensors in `dtype`; `rows`: only these of the first dimension."""
    return {
        pattern: [reader.read(stored, rows).to(dtype) for stored in group]
        for pattern, group in task.sources.items()
    }


class DtypePlan:
    """transformers' dtype plan: some weights stay fp32, the others take the model's own type."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._types: dict[str, torch.dtype] = {k: t.dtype for k, t in model.state_dict().items()}
        self._plan: dict[re.Pattern[str], torch.dtype] = {
            re.compile(pattern.replace("*", ".*")): dtype
            for pattern, dtype in model._get_dtype_plan(model.dtype).items()
        }

    def of(self, name: str) -> torch.dtype:
        """The type of the model tensor `name`."""
        for pattern, dtype in self._plan.items():
            if pattern.search(name):
                return dtype
        return self._types[name]


class _Planner:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._state = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        self._banks = bank_targets(model)
        self._tasks: dict[tuple[str, int | None], Task] = {}
        self._unexpected: list[str] = []

    def plan(self, stored: Mapping[str, StoredTensor]) -> LoadPlan:
        for key in sorted(stored, key=dot_natural_key):
            self._add(stored[key])
        self._check_unexpected()
        missing = self._check_missing()
        tasks = sorted(self._tasks.values(), key=lambda task: task.first_file)
        return LoadPlan(tuple(tasks), missing)

    def _add(self, stored: StoredTensor) -> None:
        target, pattern = self._rename(stored.key)
        if target not in self._state:
            self._unexpected.append(stored.key)
            return
        if stored.dtype not in FLOAT_DTYPES and self._state[target].is_floating_point():
            raise ConfigError(
                f"tensor {stored.key} in {stored.file} is stored as {stored.dtype}; supported are "
                f"{', '.join(FLOAT_DTYPES)}"
            )
        bank = self._banks.get(target)
        expert = None
        if bank is not None and pattern is not None and "*" in pattern:
            expert = self._expert_index(stored.key, pattern, bank)
        task = self._tasks.get((target, expert))
        if task is None:
            converter = None if pattern is None else self._by_pattern[pattern]
            task = self._tasks[target, expert] = Task(target, converter, {}, bank, expert)
        task.sources.setdefault(pattern or stored.key, []).append(stored)

    def _rename(self, key: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(
            key, self._renamings, self._converters, prefix, self._state
        )
        if target not in self._state and key in self._state:
            target, pattern = rename_source_key(key, [], [], prefix, self._state)
        return target, pattern

    def _expert_index(self, key: str, pattern: str, bank: BankTarget) -> int:
        """The number that stands where the pattern has its `*`."""
        renamed, _ = rename_source_key(key, self._renamings, [], None, None)
        found = re.search(pattern.replace("*.", r"(\d+)\."), renamed)
        if found is None:
            raise ConfigError(f"cannot read the expert's number from the tensor name {key}")
        expert = int(found.group(1))
        if expert >= bank.num_experts:
            raise ConfigError(
                f"tensor {key} is of expert {expert}, the config has {bank.num_experts} experts"
            )
        return expert

    def _check_unexpected(self) -> None:
        ignored = [*IGNORED_KEYS, *(self._model._keys_to_ignore_on_load_unexpected or ())]
        pattern = re.compile("|".join(f"({p})" for p in ignored))
        unexpected = [key for key in self._unexpected if not pattern.search(key)]
        if unexpected:
            raise ConfigError(
                f"the checkpoint has {len(unexpected)} tensors that "
                f"{type(self._model).__name__} does not know: {_some(unexpected)}"
            )

    def _check_missing(self) -> frozenset[str]:
        present = {name for task in self._tasks.values() for name in _produced(task)}
        missing = {name for name in self._state if name not in present}
        absent = [
            *self._untied(missing),
            *(name for task in self._tasks.values() for name in _incomplete(task)),
            *self._absent_experts(),
        ]
        if absent:
            raise ConfigError(
                f"the checkpoint lacks {len(absent)} tensors of {type(self._model).__name__}: "
                f"{_some(absent)}"
            )
        return frozenset(missing)

    def _untied(self, missing: set[str]) -> list[str]:
        """Missing tensors that no present one can be tied to."""
        tied = self._model.all_tied_weights_keys
        ignored = self._model._keys_to_ignore_on_load_missing or ()
        partners: dict[str, set[str]] = {}
        for target, source in tied.items():
            group = partners.setdefault(source, {source})
            group.add(target)
            partners[target] = group
        return [
            name
            for name in sorted(missing)
            if not (partners.get(name, set()) - missing)
            and not any(re.search(pattern, name) for pattern in ignored)
        ]

    def _absent_experts(self) -> list[str]:
        """Experts without any tensor, where the checkpoint stores experts one by one."""
        absent = []
        for target, bank in self._banks.items():
            if (target, None) in self._tasks:
                continue
            absent += [
                f"{target}[{expert}]"
                for expert in range(bank.num_experts)
                if (target, expert) not in self._tasks
            ]
        return absent


def _produced(task: Task) -> list[str]:
    if task.converter is None:
        return [task.target]
    first = task.converter.target_patterns[0]
    return [task.target.replace(first, other) for other in task.converter.target_patterns]


def _incomplete(task: Task) -> list[str]:
    """Source tensors of an expert that the converter needs and the checkpoint lacks."""
    if task.converter is None or task.expert is None:
        return []
    return [
        f"{pattern} of {task.target}[{task.expert}]"
        for pattern in task.converter.source_patterns
        if pattern not in task.sources
    ]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    return shown if len(names) <= MAX_NAMES_SHOWN else f"{shown}, …"
