"""The launcher with stand-ins: `run_supervisor.py PORT RUN_DIR_BASE [NAME=BEHAVIOUR …]`."""

import os
import sys
import time
from pathlib import Path

from freetoken import log
from freetoken.errors import EngineError
from freetoken.launcher import rundir
from freetoken.launcher.child import Room
from freetoken.launcher.health import HealthPoller
from freetoken.launcher.keeper import Keeper
from freetoken.launcher.notify import Notifier
from freetoken.launcher.report import Report
from freetoken.launcher.supervisor import Supervisor
from freetoken.wire.keeping import keeper_path

FAKE = str(Path(__file__).with_name("fake_room.py"))


def main() -> int:
    port, base = sys.argv[1:3]
    behaviours = dict(argument.split("=") for argument in sys.argv[3:])
    restarts = {"api": 5, "worker": int(behaviours.pop("restarts", 0))}
    log.setup("launcher")
    poller = HealthPoller("127.0.0.1", int(port), busy_s=0.05, calm_s=0.1)
    standbys = behaviours.pop("standbys", None)

    def argv(name: str, *more: str) -> tuple[str, ...]:
        behaviour = behaviours.get(name, "well")
        command = (sys.executable, FAKE, f"freetoken-{name}", port, behaviour)
        return (*command, *more, "--launcher-pid", str(os.getpid()))

    rooms = [
        Room(
            f"freetoken-{name}",
            argv(name),
            restarts.get(name, 0),
            argv(name, "--stand-by") if name == standbys else (),
        )
        for name in ("scheduler", "worker", "api")
    ]
    with rundir.launcher_dir(Path(base) / "run") as run_dir:
        poller.start()
        try:
            Supervisor(
                rooms,
                env={**os.environ, "PYTHONPATH": os.getcwd()},
                get_health=lambda: poller.latest,
                describe=lambda health: f"serving {health.model} with {health.context_tokens}",
                report=Report(sys.stdout, sys.stderr, time.monotonic),
                notifier=Notifier(os.environ),
                keeper=Keeper(keeper_path(run_dir)),
            ).run()
        except EngineError as error:
            print(f"last: {error}", file=sys.stderr)
            return error.exit_code
        finally:
            poller.stop()
    return 0


sys.exit(main())
