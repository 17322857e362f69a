#!/usr/bin/env python3
"""Builds cuda/ into one library, for machines that have no nvcc or should not wait for it.

    python tools/build_cuda.py                 for all architectures, into build/cuda
    python tools/build_cuda.py --arch 90       for one

The worker finds it there, or in ~/.cache/freetoken/cuda of the machine that it runs on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from freetoken.kernels import cuda_library


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    nvcc = cuda_library.find_nvcc()
    if nvcc is None:
        print("build_cuda: error: no nvcc; set CUDA_HOME to a CUDA toolkit", file=sys.stderr)
        return 1
    try:
        path = cuda_library.build(options.arch or cuda_library.ALL_ARCHS, options.output, nvcc)
    except subprocess.CalledProcessError as error:
        print(f"build_cuda: error: {error.stderr.strip()}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch",
        action="append",
        metavar="90",
        help="compute capability without the dot; default: " + ", ".join(cuda_library.ALL_ARCHS),
    )
    parser.add_argument(
        "--output", type=Path, default=cuda_library.make_dir(), help="directory of the library"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
