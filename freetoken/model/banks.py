"""The memory of a checkpoint's banks: whose it is, found again or made, once enough is free."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from freetoken import log
from freetoken.errors import ConfigError
from freetoken.experts.bank import ExpertBank, RowBank
from freetoken.experts.layout import ExpertLayout
from freetoken.experts.shared import GIB, BankIdentity, BankLayer, BankMemory
from freetoken.model.assemble import MakeBank
from freetoken.model.build import build_meta_model
from freetoken.model.checkpoint import digest_files, read_config, resolve_dtype
from freetoken.model.experts import experts_modules, num_experts, plan_layout
from freetoken.model.fill import MAX_FLIGHT_BYTES

SOFTWARE = ("freetoken", "torch", "transformers")

_log = log.get(__name__)


class BankKeeper(Protocol):
    """Keeps the descriptor of one memory for the worker that comes after this one."""

    def take(self, digest: str) -> int | None:
        """A new descriptor of what is kept under `digest`, if anything."""
        ...

    def keep(self, digest: str, fd: int) -> None:
        """Keep `fd` beside us, instead of what was kept before."""
        ...

    def drop(self) -> None:
        """Forget what is kept, so that its memory is free."""
        ...


def identify_banks(path: Path, model: PreTrainedModel, device: str) -> BankIdentity:
    """Equal if the banks' contents are, and what has passed the self-check before they were filled:
    files, types, software, device."""
    versions = " ".join(f"{name} {version(name)}" for name in SOFTWARE)
    if device != "cpu":
        device = f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    layers = tuple(
        BankLayer(name, num_experts(module), plan_layout(name, module))
        for name, module in experts_modules(model)
    )
    return BankIdentity(f"{digest_files(path)} {versions} {device}", layers)


def find_banks(path: Path, dtype: str, device: str, keeper: BankKeeper) -> BankMemory | None:
    """The memory that an earlier worker has left for this checkpoint, whole or filled in part.

    What was left of another one is dropped. `dtype` is the option's value. Raises ConfigError.
    """
    config = read_config(path)
    model = build_meta_model(config, resolve_dtype(path, config, dtype))
    return attach_banks(identify_banks(path, model, device), keeper)


def attach_banks(identity: BankIdentity, keeper: BankKeeper) -> BankMemory | None:
    """See `find_banks`."""
    fd = keeper.take(identity.digest)
    if fd is None:
        return None
    memory = BankMemory.attach(fd, identity)
    if memory is None:
        os.close(fd)
        keeper.drop()
        _log.info(log.event("bank.dropped", why="it is of another checkpoint or version"))
        return None
    _log.info(
        log.event(
            "bank.found",
            layers=len(identity.layers),
            filled=memory.num_filled,
            mib=memory.taken_bytes >> 20,
        )
    )
    return memory


def open_banks(
    identity: BankIdentity,
    found: BankMemory | None,
    keeper: BankKeeper | None,
    free_bytes: int | None,
) -> BankMemory:
    """`found` if it is of this identity, else new memory, which is kept from now on.

    ConfigError if `free_bytes` is not enough for what is still to be taken.
    """
    memory = found
    if found is not None and found.identity != identity:  # the files changed meanwhile
        found.close()
        memory = None
    if free_bytes is not None and (memory is None or not memory.is_whole):
        taken_bytes = 0 if memory is None else memory.taken_bytes
        check_host_memory(identity.num_bytes - taken_bytes, free_bytes)
    if memory is None:
        memory = BankMemory.create(identity)
        if keeper is not None and memory.fd is not None:
            keeper.keep(identity.digest, memory.fd)
    return memory


def check_host_memory(bank_bytes: int, free_bytes: int) -> None:
    """ConfigError if banks that need so much more are too large.

    `free_bytes`: what may be taken, limits of the container included.
    """
    loading_bytes = min(2 * MAX_FLIGHT_BYTES, bank_bytes)
    if bank_bytes + loading_bytes > free_bytes:
        raise ConfigError(
            f"the expert banks need {bank_bytes / GIB:.2f} GiB of host memory and loading them "
            f"{loading_bytes / GIB:.2f} GiB, {max(0, free_bytes) / GIB:.2f} GiB are free (limits "
            "of the container included); free memory, raise the limit, or serve a smaller model "
            "or dtype"
        )


def banks_in(memory: BankMemory) -> MakeBank:
    """Banks whose rows are that memory."""

    def make(layer: int, name: str, layout: ExpertLayout, num_experts: int) -> ExpertBank:
        assert memory.identity.layers[layer] == BankLayer(name, num_experts, layout)
        return RowBank(layout, num_experts, memory.rows(layer))

    return make
