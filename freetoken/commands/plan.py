"""`ft plan MODEL`: what a GPU and its host can do with a model, before either is there.

From config.json alone: the memory plan, part by part, and what more context would cost in resident
experts and speed. Prints to stdout; what cannot be is a ShortfallError with the arithmetic.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken import options
from freetoken.commands import checkpoint
from freetoken.commands.quantity import parse_bytes, parse_rate
from freetoken.commands.resolve import LocalModel, resolve_config
from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.experts.cost import Link, Machine
from freetoken.worker.budget import budget_of, card_budget_of, measure_budget

if TYPE_CHECKING:
    from freetoken.worker.sizes import ModelSizes

DESCRIPTION = (
    "Say what a GPU and its host's memory can do with MODEL: the memory plan, the context, the "
    "resident experts, and the speed to expect. Needs config.json only, neither GPU nor weights."
)
DEFAULT_LINK = "25GB/s"
DEFAULT_VRAM_RATE = "800GB/s"
DEFAULT_TFLOPS = 80.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """What is planned for. Budgets are what is left after margins."""

    vram_bytes: int
    budget_bytes: int
    host_bytes: int
    host_budget_bytes: int
    machine: Machine


def run(argv: Sequence[str]) -> int:
    parser = options.Parser("ft plan", DESCRIPTION)
    options.add_options(parser, "directory with a config.json, or hub name")
    _add_hardware(parser)
    args = parser.parse(argv)
    config = options.resolve(args).config
    if config.device == "cpu" or config.experts == "in-place":
        flag = "--device cpu" if config.device == "cpu" else "--experts in-place"
        raise ConfigError(f"ft plan is about GPUs; leave {flag} out")
    hardware = find_hardware(args)
    model = resolve_config(config.model)
    sizes = read_sizes(model, config)
    from freetoken.commands.plan_text import describe  # loads no more than read_sizes did

    print(describe(model.name, sizes, config, hardware), end="")
    return 0


def read_sizes(model: LocalModel, config: Config) -> ModelSizes:
    """The model's numbers; ConfigError if it cannot be run, or its dtype is not known."""
    checkpoint.check_config(model.directory)
    if config.dtype == "auto" and not _names_dtype(model.directory):
        raise ConfigError(
            f"{model.directory / checkpoint.CONFIG} does not say in which type the weights are; "
            "give --dtype bfloat16, float16 or float32"
        )
    # Only now torch is needed, which takes seconds to load.
    from freetoken.model.load import read_shape
    from freetoken.worker.checkpoint import sizes_of

    return sizes_of(read_shape(model.directory, config.dtype), on_gpu=True)


def _names_dtype(directory: Path) -> bool:
    raw = json.loads((directory / checkpoint.CONFIG).read_text(encoding="utf-8"))
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    return any(part.get("dtype") or part.get("torch_dtype") for part in parts)


# ---------------------------------------------------------------- hardware


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    section = parser.add_argument_group("hardware to plan for (by default this machine's)")
    section.add_argument("--vram", metavar="SIZE", help="memory of the GPU, such as 24GiB")
    section.add_argument("--host-ram", metavar="SIZE", help="memory of the host, such as 64GiB")
    section.add_argument(
        "--link", metavar="RATE", help=f"copies from host to GPU [measured, else {DEFAULT_LINK}]"
    )
    section.add_argument(
        "--vram-rate",
        metavar="RATE",
        default=DEFAULT_VRAM_RATE,
        help=f"what kernels read from the GPU's memory [{DEFAULT_VRAM_RATE}]",
    )
    section.add_argument(
        "--tflops",
        metavar="X",
        default=str(DEFAULT_TFLOPS),
        help=f"what matrix products reach, in 10^12 operations per second [{DEFAULT_TFLOPS:.0f}]",
    )


def find_hardware(args: argparse.Namespace) -> Hardware:
    """What the flags say, the rest from this machine; ConfigError if it has no GPU to look at."""
    machine_rates = (parse_rate(args.vram_rate, "--vram-rate"), _parse_tflops(args.tflops))
    vram = None if args.vram is None else parse_bytes(args.vram, "--vram")
    host = None if args.host_ram is None else parse_bytes(args.host_ram, "--host-ram")
    link = None if args.link is None else Link.of_copy(parse_rate(args.link, "--link"))
    if vram is not None and host is not None:
        return _hardware(vram, host, link or _default_link(), machine_rates)
    here = _look_at_gpu()
    if here is None:
        missing = " and ".join(
            flag for flag, value in (("--vram", vram), ("--host-ram", host)) if value is None
        )
        raise ConfigError(
            f"this machine has no GPU to plan for; give {missing}, for example "
            "--vram 24GiB --host-ram 64GiB"
        )
    vram_here, link_here = here
    found = _hardware(vram or vram_here, host or 0, link or link_here, machine_rates)
    if host is None:
        budget = measure_budget()
        found = replace(found, host_bytes=budget, host_budget_bytes=budget)
    return found


def _hardware(vram: int, host: int, link: Link, rates: tuple[float, float]) -> Hardware:
    return Hardware(vram, card_budget_of(vram), host, budget_of(host), Machine(link, *rates))


def _default_link() -> Link:
    return Link.of_copy(parse_rate(DEFAULT_LINK, "--link"))


def _parse_tflops(text: str) -> float:
    try:
        tflops = float(text)
    except ValueError:
        tflops = 0.0
    if not 0 < tflops < float("inf"):
        raise ConfigError(f"--tflops {text} must be a number above 0")
    return tflops * 1e12


def _look_at_gpu() -> tuple[int, Link] | None:
    """Memory of this machine's first GPU, and its link; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    from freetoken.worker.link_speed import measure_link

    device = torch.device("cuda", 0)
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return total, measure_link(device) or _default_link()
