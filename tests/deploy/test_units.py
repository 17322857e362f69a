"""The files of deploy/: they parse, they name real commands and options, they say what we do."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from freetoken import cli, options
from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.launcher.given_up import GRACE_S
from freetoken.scheduler.health import HUNG_RATE
from tests.processes import ROOT

UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))


def read_unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Sections of keys with all their values; a key may stand several times."""
    unit: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            section = unit.setdefault(line[1:-1], {})
        elif line and not line.startswith(("#", ";")):
            key, equals, value = line.partition("=")
            assert equals, line
            section.setdefault(key, []).append(value)
    return unit


def test_there_is_a_unit_for_the_launcher_and_one_for_each_process() -> None:
    names = {path.stem for path in UNITS}
    assert all(read_unit(path).keys() == {"Unit", "Service", "Install"} for path in UNITS)
    assert names == {"freetoken", *(f"freetoken-{name}" for name in cli.PROCESSES)}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_an_existing_command_with_existing_options(path: Path) -> None:
    service = read_unit(path)["Service"]
    (command,) = service["ExecStart"]
    program, name, *arguments = shlex.split(command)
    assert Path(program).name == "ft"
    assert name == (path.stem.partition("-")[2] or "serve")
    assert name in cli.COMMANDS
    parser = options.Parser("ft", "")
    options.add_options(parser)
    parser.parse(arguments)
    environ = dict(
        pair.split("=", 1) for line in service["Environment"] for pair in shlex.split(line)
    )
    assert "run_dir" in options.read_environment(environ)
    assert service["RestartPreventExitStatus"] == [str(ConfigError.exit_code)]


def test_the_launcher_s_unit_waits_for_its_notification() -> None:
    service = read_unit(ROOT / "deploy/systemd/freetoken.service")["Service"]
    assert service["Type"] == ["notify"]
    assert service["NotifyAccess"] == ["main"]
    assert service["KillMode"] == ["mixed"], "the launcher ends its children itself"
    # It gives none from the stall limit on; the launcher comes first.
    hung_s = (HUNG_RATE - 1) * Config().stall_timeout_s + GRACE_S
    assert int(service["WatchdogSec"][0]) > hung_s + 10


def test_the_worker_s_unit_keeps_one_descriptor() -> None:
    service = read_unit(ROOT / "deploy/systemd/freetoken-worker.service")["Service"]
    assert service["FileDescriptorStoreMax"] == ["1"]
    assert service["NotifyAccess"] == ["main"], "it is the worker that asks for it"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    for path in UNITS:
        text = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", path.read_text())
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / path.name) for path in UNITS)],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        timeout=60,
    )
    ours = [line for line in done.stderr.splitlines() if "freetoken" in line]
    assert ours == []


def test_the_example_configuration_is_accepted_and_so_are_its_commented_options(
    tmp_path: Path,
) -> None:
    example = ROOT / "deploy/freetoken.toml"
    assert options.read_file(example).keys() >= {"host", "port"}
    uncommented = re.sub(r"(?m)^# (?=\w+ = )", "", example.read_text()).replace("…", "key")
    (tmp_path / "all.toml").write_text(uncommented)
    values = options.read_file(tmp_path / "all.toml")
    assert values.keys() >= {"model", "api_key", "context_tokens"}
    options.build(values, dict.fromkeys(values, "example"))


def test_the_container_runs_as_a_user_and_copies_what_the_wheel_needs() -> None:
    text = (ROOT / "deploy/Containerfile").read_text()
    assert re.search(r"(?m)^USER freetoken$", text)
    for source in re.findall(r"(?m)^COPY (.+) \S+$", text):
        assert all((ROOT / name).exists() for name in source.split())
    environ = dict(re.findall(r"(FREETOKEN_\w+)=(\S+)", text.split("FROM")[1]))
    options.read_environment(dict.fromkeys(environ, "1"))
