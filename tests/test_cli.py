import re
import subprocess
import sys

import pytest

from freetoken import cli
from freetoken.nearest import find_nearest, suggest
from tests.processes import ROOT, clean_environment, run_python


def ft(*argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "freetoken.cli", *argv],
        cwd=ROOT,
        env=clean_environment(**extra),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version_is_printed() -> None:
    done = ft("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"ft \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",)])
def test_help_names_every_command(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["srve"], "ft: error: unknown command srve, did you mean serve? (see ft --help)"),
        (["--prot"], "ft: error: unknown option --prot (see ft --help)"),
        (["config", "--prot"], "ft: error: unknown option --prot, did you mean --port?"),
        (["serve", "/nowhere/x", "--port", "0"], "ft: error: no directory /nowhere/x"),
        (["worker", "--page-size", "0"], "freetoken-worker: error: --page-size 0 must be"),
    ],
)
def test_an_error_is_one_line_on_stderr_with_exit_code_2(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("command", ["serve", "plan", "config", "api", "scheduler", "worker"])
def test_help_of_a_command_lists_the_options_and_hides_internal_ones(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--context-tokens N" in text
    assert "FREETOKEN_PAGE_SIZE" in text
    assert "launcher-pid" not in text


def test_config_prints_values_and_origins_and_survives_a_closed_pipe() -> None:
    done = ft("config", "--port", "7", FREETOKEN_MAX_ROWS="3")
    assert done.returncode == 0
    assert re.search(r"^port +7 +--port$", done.stdout, re.MULTILINE)
    assert re.search(r"^max_rows +3 +FREETOKEN_MAX_ROWS$", done.stdout, re.MULTILINE)
    piped = subprocess.run(
        f"{sys.executable} -m freetoken.cli config --toml | true",
        shell=True,
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert piped.stderr == ""


def test_the_nearest_name_is_a_prefix_or_the_most_alike() -> None:
    names = ["--port", "--page-size", "--num-pages", "--num-tokens"]
    assert find_nearest("--port-numer", names) == "--port"
    assert find_nearest("--pagesize", names) == "--page-size"
    assert find_nearest("--num-tokns", names) == "--num-tokens"
    assert find_nearest("--xyzzy", names) is None
    assert find_nearest("x", []) is None
    assert suggest("--xyzzy", names) == ""


WORKER_THAT_FAILS = """
import atexit, sys
from freetoken import cli
atexit.register(print, "taken apart")
sys.argv[1:] = ["worker", "/nowhere"]
print("begun")
cli.main()
"""


def test_a_worker_ends_without_the_interpreters_own_end() -> None:
    done = run_python(WORKER_THAT_FAILS)
    assert done.returncode == 2
    assert done.stderr.startswith("freetoken-worker: error: no directory /nowhere")
    assert done.stdout == "begun\n"
