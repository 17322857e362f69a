"""The `ft` command: picks the subcommand and turns its errors into one last line.

Each subcommand is a module of freetoken/commands with `run(argv) -> exit code`, imported only
when it is asked for, so that `ft --help` is quick and the api never loads what the worker needs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import NoReturn, cast

from freetoken.errors import ConfigError, EngineError, FreeTokenError
from freetoken.nearest import suggest

Run = Callable[[Sequence[str]], int]

PROCESSES = ("api", "scheduler", "worker")

COMMANDS = {
    "serve": "serve a model over HTTP: starts and supervises the three processes",
    "plan": "say what a GPU can do with a model: memory, context, speed",
    "chat": "talk to a server in the terminal",
    "demo": "build the demo model, or say where it is",
    "config": "print every option, its value and what set it",
    "api": "the process that owns text: HTTP, templates, tokens",
    "scheduler": "the process that owns numbers: requests, pages, step plans",
    "worker": "the process that owns bytes: weights, experts, forwards",
}

INTERRUPTED = 128 + 2
"""Exit code of a shell for a process ended by SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ft argv`, by default the process's own arguments; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = run(arguments)
    if argv is None and arguments[:1] == ["worker"]:
        _leave(code)
    return code


def run(arguments: list[str]) -> int:
    """`ft arguments`; errors become one line."""
    name = "ft"
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(describe(), end="")
            return 0
        if arguments[0] in ("-V", "--version", "version"):
            print(f"ft {version('freetoken')}")
            return 0
        command = arguments[0]
        if command not in COMMANDS:
            kind = "option" if command.startswith("-") else "command"
            raise ConfigError(
                f"unknown {kind} {command}{suggest(command, COMMANDS)} (see ft --help)"
            )
        if command in PROCESSES:
            name = f"freetoken-{command}"
        return _load(command)(arguments[1:])
    except EngineError as error:
        return _fail(name, error, error.exit_code)
    except FreeTokenError as error:
        return _fail(name, error, EngineError.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `ft config | head`: nobody reads on, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _leave(code: int) -> NoReturn:
    """End this process here: to take a million of torch's objects apart takes the interpreter
    seconds, and after a fault of the GPU it may not get to an end at all."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def describe() -> str:
    """The text of `ft --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ft COMMAND [MODEL] [options]",
            "",
            "Serve Mixture-of-Experts language models that are larger than the GPU's memory.",
            "",
            *lines,
            "",
            "ft COMMAND --help lists the options of a command, ft --version the version.",
            "",
        ]
    )


def _load(command: str) -> Run:
    if command in PROCESSES:
        process = importlib.import_module("freetoken.commands.process")
        return cast(Run, partial(process.run, command))
    return cast(Run, importlib.import_module(f"freetoken.commands.{command}").run)


def _fail(name: str, error: FreeTokenError, exit_code: int) -> int:
    sys.stdout.flush()
    print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
