"""`ft serve`: check what can be checked in seconds, then start and watch the three processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from freetoken import log, options
from freetoken.commands import checkpoint, host
from freetoken.commands.again import ft_command
from freetoken.commands.config import dump
from freetoken.commands.resolve import complete, resolve_model
from freetoken.config import Config
from freetoken.launcher import rundir
from freetoken.launcher.child import Room
from freetoken.launcher.health import HealthPoller
from freetoken.launcher.keeper import Keeper
from freetoken.launcher.notify import Notifier
from freetoken.launcher.report import Report, base_url, describe_server, show_bytes
from freetoken.launcher.supervisor import Supervisor
from freetoken.wire.keeping import keeper_path
from freetoken.worker.budget import measure_budget

DESCRIPTION = "Serve MODEL over HTTP: start the three processes, watch them, end them together."
NAME = "freetoken-launcher"
ROOMS = ("scheduler", "worker", "api")
API_RESTARTS = 5
"""Within a minute. It has nothing to lose but its streams."""


def run(argv: Sequence[str]) -> int:
    parser = options.Parser("ft serve", DESCRIPTION)
    options.add_options(parser)
    config = options.resolve(parser.parse(argv)).config
    _set_title()
    log.setup(NAME, config.log_level)
    report = Report(sys.stdout, sys.stderr, time.monotonic)
    host.warn_if_open(config)
    config, found = check(config, report)
    serve(config, found, report)
    report.title("stopped")
    return 0


def check(config: Config, report: Report) -> tuple[Config, checkpoint.Checkpoint]:
    """Everything that fails within seconds; the configuration comes back complete."""
    started_s = time.monotonic()
    port = host.reserve_port(config.host, config.port)
    model = resolve_model(config.model)
    found = checkpoint.check(model.directory, config.dtype)
    with_gpu = host.may_use_gpu(config)
    host.check_memory(found.weight_bytes, measure_budget(), with_gpu=with_gpu)
    config = complete(config, model).model_copy(update={"port": port})
    report.title(
        f"FreeToken {version('freetoken')}: {config.served_model_name[0]} "
        f"({found.model_type}, {show_bytes(found.weight_bytes)})"
    )
    report.step("checked", time.monotonic() - started_s, str(model.directory))
    return config, found


def serve(config: Config, found: checkpoint.Checkpoint, report: Report) -> None:
    """Returns after a clean end; EngineError says why it ended otherwise."""
    url = base_url(config.host, config.port)
    with rundir.launcher_dir(config.run_dir) as run_dir:
        path = run_dir / rundir.CONFIG
        rundir.write_private(path, dump(config.model_copy(update={"run_dir": run_dir})))
        poller = HealthPoller(config.host, config.port)
        restarts = {"api": API_RESTARTS, "worker": config.worker_restarts}
        supervisor = Supervisor(
            [make_room(name, path, restarts.get(name, 0)) for name in ROOMS],
            env=child_environment(os.environ),
            get_health=lambda: poller.latest,
            describe=lambda health: describe_server(
                health,
                url,
                has_key=config.api_key is not None,
                can_chat=found.has_chat_template,
            ),
            report=report,
            notifier=Notifier(os.environ),
            keeper=Keeper(keeper_path(run_dir)),
        )
        poller.start()
        try:
            supervisor.run()
        finally:
            poller.stop()


def make_room(name: str, config_path: Path, max_restarts: int) -> Room:
    """`ft NAME` with our configuration. A worker that may come again has another one standing by:
    half of a start is to import libraries."""
    argv = ft_command(name, "--config", str(config_path), "--launcher-pid", str(os.getpid()))
    stands_by = name == "worker" and max_restarts > 0
    return Room(f"freetoken-{name}", argv, max_restarts, (*argv, "--stand-by") if stands_by else ())


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Ours, without options (the file has them all) and what the service manager gave to us."""
    watchdog = ("WATCHDOG_USEC", "WATCHDOG_PID")
    ours = ("NOTIFY_SOCKET", *watchdog, "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID")
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(options.ENV_PREFIX) and name not in ours
    }


def _set_title() -> None:
    from setproctitle import setproctitle

    setproctitle(NAME)
