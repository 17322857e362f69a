"""What each process loads, seen from a fresh interpreter."""

import importlib.util

import pytest

from tests.processes import ROOT, run_python

HEAVY = ("torch", "triton", "safetensors")
ENTRIES = {
    "freetoken.cli": (*HEAVY, "numpy", "transformers", "pydantic", "zmq"),
    "freetoken.config": (*HEAVY, "numpy", "transformers", "zmq"),
    "freetoken.options": (*HEAVY, "numpy", "transformers", "zmq"),
    "freetoken.commands.serve": (*HEAVY, "numpy", "transformers", "starlette"),
    "freetoken.commands.process": (*HEAVY, "numpy", "transformers", "starlette", "tokenizers"),
    "freetoken.commands.chat": HEAVY,
    "freetoken.commands.plan": (*HEAVY, "numpy", "transformers"),
    "freetoken.commands.demo": HEAVY,
    "freetoken.launcher.supervisor": (*HEAVY, "numpy", "transformers", "starlette"),
    "freetoken.api.process": HEAVY,
    "freetoken.scheduler.process": (*HEAVY, "numpy", "transformers", "tokenizers", "starlette"),
}


@pytest.mark.parametrize(("module", "forbidden"), ENTRIES.items(), ids=ENTRIES)
def test_an_entry_loads_only_what_its_room_may_know(
    module: str, forbidden: tuple[str, ...]
) -> None:
    assert importlib.util.find_spec(module) is not None
    program = f"import sys, {module}; print(*sys.modules)"
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded & set(forbidden) == set()


def test_no_package_runs_code_when_imported() -> None:
    for path in (ROOT / "freetoken").rglob("__init__.py"):
        lines = [line for line in path.read_text().splitlines() if line]
        assert lines, path
        assert lines[0].startswith('"""'), path
        assert lines[-1].endswith('"""'), path
        assert not any(line.startswith(("import", "from")) for line in lines), path
