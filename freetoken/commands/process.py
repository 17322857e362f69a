"""`ft api`, `ft scheduler`, `ft worker`: one process, started by the launcher or by itself.

All three take the same options, so one configuration serves them all. Started by itself, a process
meets the others in a fixed private run directory, and what the launcher would have checked is
checked here.
"""

from __future__ import annotations

import gc
import importlib
import shutil
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from types import ModuleType

from freetoken import log, options
from freetoken.commands import checkpoint, host
from freetoken.commands.resolve import complete, resolve_model
from freetoken.config import Config
from freetoken.kernels.threads import limit_spinning
from freetoken.launcher import guard, rundir

DESCRIPTIONS = {
    "api": "The process that owns text: HTTP, chat templates, tokens.",
    "scheduler": "The process that owns numbers: requests, prefix cache, pages, step plans.",
    "worker": "The process that owns bytes: weights, experts, KV cache, forwards.",
}


def run(room: str, argv: Sequence[str]) -> int:
    parser = options.Parser(
        f"ft {room}",
        f"{DESCRIPTIONS[room]} `ft serve` starts it; to run it as a service of its own, start "
        "api, scheduler and worker with the same options, in any order. They meet in --run-dir, "
        f"here by default {rundir.shared_dir()}.",
    )
    options.add_options(parser)
    parser.add_argument("--launcher-pid", type=int, help=SUPPRESS)
    parser.add_argument("--stand-by", action="store_true", help=SUPPRESS)
    args = parser.parse(argv)
    config = options.resolve(args).config
    if args.launcher_pid is None:
        return run_alone(room, config)
    guard.end_with_launcher(args.launcher_pid, leaves_files=room == "scheduler")
    assert config.run_dir is not None
    try:
        return start(room, config, guard.await_call if args.stand_by else None)
    finally:
        if room == "scheduler" and guard.is_launcher_gone(args.launcher_pid):
            shutil.rmtree(config.run_dir, ignore_errors=True)  # what the launcher would have done


def run_alone(room: str, config: Config) -> int:
    """Without a launcher: find the model, prepare the run directory, run."""
    if room == "api":
        log.setup("freetoken-api", config.log_level)
        host.warn_if_open(config)
    run_dir = rundir.prepare(config.run_dir or rundir.shared_dir())
    if room != "scheduler":  # it never looks at the model
        model = resolve_model(config.model)
        checkpoint.check(model.directory, config.dtype)
        config = complete(config, model)
    return start(room, config.model_copy(update={"run_dir": run_dir}))


def start(room: str, config: Config, await_call: Callable[[], None] | None = None) -> int:
    """The room's own entry point; it is imported only here, which takes the worker seconds: one
    that stands by begins after that, when `await_call` returns."""
    if room == "worker":
        limit_spinning()
    process = _import(f"freetoken.{room}.process")
    if await_call is not None:
        if room == "worker":
            process.prepare(config)
        await_call()
    try:
        return int(process.run(config))
    finally:
        gc.unfreeze()  # at the very end some libraries complain of what was left frozen


def _import(name: str) -> ModuleType:
    """Nothing of a million objects is garbage yet: to look for some takes a fifth of the time."""
    gc.disable()
    try:
        module = importlib.import_module(name)
    finally:
        gc.enable()
    gc.freeze()
    return module
