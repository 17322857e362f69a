"""The MODEL argument → a local directory: the demo, a directory, or a download from the hub.

Called by `ft serve` and by the process commands before anything heavy starts; imports neither
torch nor transformers. What the directory holds is checkpoint.py's to check.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from freetoken.commands import checkpoint
from freetoken.commands.again import ft_command
from freetoken.config import Config
from freetoken.errors import ConfigError, EngineError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""`name` or `owner/name`, as the hub allows them."""

SMALL_FILES = ["*.json", "*.jinja", "tokenizer*"]
"""Everything but the weights; the weights' index tells which files those are."""
CONFIG_FILES = [checkpoint.CONFIG, checkpoint.MODELOPT]
"""What is enough to plan."""
SUBDIRECTORIES = ["*/*"]
"""Other formats and the originals: never needed."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A directory, and the name that clients use for it unless another is configured."""

    directory: Path
    name: str


EnsureDemo = Callable[[], Path]
Download = Callable[[str, list[str]], Path]
"""Fetch the files of a repository that match the patterns; returns its directory."""


def resolve_model(
    model: str | None,
    *,
    ensure_demo: EnsureDemo | None = None,
    download: Download | None = None,
) -> LocalModel:
    """The directory of `model`; ConfigError if there is none. May download, may build the demo."""
    if model is None:
        directory = (ensure_demo or _ensure_demo)()
        return LocalModel(directory, directory.name)
    return _find_directory(model) or LocalModel(_fetch(model, download or _download), model)


def resolve_config(model: str | None, *, download: Download | None = None) -> LocalModel:
    """Like resolve_model, but only config.json is downloaded, and no demo is built."""
    if model is None:
        raise ConfigError("no model is given; name a directory or a model on the hub")
    return _find_directory(model) or LocalModel((download or _download)(model, CONFIG_FILES), model)


def _find_directory(model: str) -> LocalModel | None:
    """None for a hub name; ConfigError for what is neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        directory = path.resolve()
        return LocalModel(directory, directory.name)
    if path.exists():
        raise ConfigError(f"{path} is a file; give the directory of a checkpoint (config.json, …)")
    if not HUB_NAME.fullmatch(model):
        raise ConfigError(f"no directory {path}, and {model!r} is no hub name (owner/name) either")
    return None


def complete(config: Config, model: LocalModel) -> Config:
    """`config` with a local directory as its model, and a name for clients."""
    return config.model_copy(
        update={
            "model": str(model.directory),
            "served_model_name": config.served_model_name or [model.name],
        }
    )


def _fetch(name: str, download: Download) -> Path:
    """Small files first, so that a model we cannot run is refused before its weights come."""
    directory = download(name, SMALL_FILES)
    checkpoint.check_config(directory)
    return download(name, SMALL_FILES + _weight_files(directory))


def _weight_files(directory: Path) -> list[str]:
    index = directory / checkpoint.INDEX
    if not index.exists():
        return [checkpoint.SINGLE]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is damaged: {error!r}") from error


def _ensure_demo() -> Path:
    """In a process of its own: building the demo loads torch, which a launcher does not want.

    It ends with us, however we end: its input is the lifeline that guard.py listens to.
    """
    done = subprocess.Popen(
        ft_command("demo", "--print-path", "--launcher-pid", str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.stdout is not None
    assert done.stderr is not None
    last = ""
    with done:
        for line in done.stderr:  # its progress; the path comes at the end
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
        path = done.stdout.read().strip()
    if done.returncode != 0:
        reason = last.removeprefix("ft: error: ") or f"exit code {done.returncode}"
        raise ConfigError(f"no model is given and the demo cannot be built: {reason}")
    return Path(path)


def _download(name: str, patterns: list[str]) -> Path:
    """huggingface_hub's download with its progress bar; HF_ENDPOINT and HF_HUB_* as usual."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import errors as hub

    where = constants.ENDPOINT
    try:
        directory = snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=SUBDIRECTORIES, etag_timeout=10
        )
    except hub.GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: accept its terms at {where}/{name}, then log in with `hf auth login`"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ConfigError(
            f"no model {name} at {where} and no directory of that name here "
            "(if it is private: `hf auth login`)"
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"{name} is not a directory, not in the cache {constants.HF_HUB_CACHE}, and "
            f"{where} cannot be reached{_because(error)}; give a directory, or check the network"
        ) from error
    except (hub.HfHubHTTPError, OSError, ValueError) as error:
        raise EngineError(f"cannot download {name} from {where}: {_first_line(error)}") from error
    return Path(directory)


def _because(error: Exception) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return " (HF_HUB_OFFLINE is set)"
    return "" if error.__cause__ is None else f" ({_first_line(error.__cause__)})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
