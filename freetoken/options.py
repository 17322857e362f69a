"""Where configuration comes from: flags, FREETOKEN_* environment, a TOML file, the defaults.

Everything is generated from the fields of Config: the flags and their help, the names of variables
and keys, the masking of secrets. Unknown names are refused with the nearest known one. Called by
the commands; knows nothing of what the options mean.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from freetoken import tomlfile
from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.nearest import suggest

ENV_PREFIX = "FREETOKEN_"
CONFIG_VARIABLE = "FREETOKEN_CONFIG"
DEFAULT = "default"
FIELDS: dict[str, FieldInfo] = dict(Config.model_fields)
SECRETS = frozenset(name for name, field in FIELDS.items() if not field.repr)

GROUPS = {
    "model": "model",
    "host": "HTTP",
    "context_tokens": "capacity (hard constraints of the memory plan)",
    "max_stall_ms": "fairness between long prompts and running streams",
    "experts": "experts",
    "threads": "processes",
}
"""The first field of each section of the help, and the section's title."""

SOURCES_HELP = (
    "Each option may also be set in the environment (--page-size: FREETOKEN_PAGE_SIZE) or in a "
    "TOML file (page_size = 16). Flags win over the environment, the environment over the file."
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and for each field what set it: a flag, a variable, a file or DEFAULT."""

    config: Config
    origins: Mapping[str, str]


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing usage and exiting."""

    def __init__(self, prog: str, description: str, epilog: str | None = SOURCES_HELP) -> None:
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like parse_args; `--page_size` is understood, the unknown is refused by name."""
        known = [option for action in self._actions for option in action.option_strings]
        end = argv.index("--") if "--" in argv else len(argv)  # what follows is no option
        dashed = [_dashed(argument) for argument in argv[:end]]
        names = [argument.partition("=")[0] for argument in dashed if _is_flag(argument)]
        unknown = [name for name in names if name not in known]
        if unknown and not any(help_flag in dashed for help_flag in ("-h", "--help")):
            raise ConfigError(f"unknown option {unknown[0]}{suggest(unknown[0], known)}")
        args, rest = self.parse_known_args([*dashed, *argv[end:]])
        if rest:
            raise ConfigError(f"unexpected argument {rest[0]!r} (see {self.prog} --help)")
        return args


def _dashed(argument: str) -> str:
    if not argument.startswith("--") or not _is_flag(argument):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _is_flag(argument: str) -> bool:
    """What argparse takes for an option; numbers such as -5 are values, `- a list` is text."""
    name = argument.partition("=")[0]
    return name[:1] == "-" and len(name) > 1 and not name[1].isdigit() and " " not in name


# ---------------------------------------------------------------- the command line


def add_options(parser: argparse.ArgumentParser, model_help: str | None = None) -> None:
    """MODEL, --config, and one flag per field, in sections."""
    model_help = model_help or FIELDS["model"].description
    parser.add_argument("model", nargs="?", metavar="MODEL", help=model_help)
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file with options [{CONFIG_VARIABLE}]"
    )
    section: argparse._ArgumentGroup | None = None
    for name, field in FIELDS.items():
        if name in GROUPS:
            section = parser.add_argument_group(GROUPS[name])
        if section is None:
            raise AssertionError(f"{name} stands before the first section of GROUPS")
        is_list = get_origin(field.annotation) is list
        if field.annotation is bool:
            section.add_argument(
                flag_of(name), dest=name, action="store_const", const=True, help=_help(field)
            )
            continue
        section.add_argument(
            flag_of(name),
            dest="model_flag" if name == "model" else name,
            action="append" if is_list else "store",
            metavar=_metavar(name, field),
            help="the same as MODEL" if name == "model" else _help(field),
        )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(name: str, field: FieldInfo) -> str:
    parts = leaves_of(field.annotation)
    choices = [str(part) for part in parts if isinstance(part, str)]
    if int in parts or float in parts:
        return "|".join([*choices, "N" if int in parts else "X"])
    if choices:
        return "|".join(choices)
    return "PATH" if Path in parts else name.rsplit("_", 1)[-1].upper()


def leaves_of(annotation: Any) -> list[Any]:
    """The types and literal values a field may take, None left out."""
    origin = get_origin(annotation)
    if origin is Literal:
        return list(get_args(annotation))
    if origin is None or origin is list:
        return [] if annotation is type(None) else [annotation]
    parts = get_args(annotation)
    if origin is not Union and hasattr(annotation, "__metadata__"):
        parts = parts[:1]
    return [leaf for part in parts for leaf in leaves_of(part)]


def _help(field: FieldInfo) -> str:
    """Description, limits and default; percent signs doubled for argparse."""
    limits = ", ".join(
        f"{sign} {getattr(item, kind)}"
        for item in field.metadata
        for kind, sign in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
        if hasattr(item, kind)
    )
    text = field.description or ""
    if limits:
        text += f"; {limits}"
    if field.default not in (None, []) and field.annotation is not bool:
        text += f" [{field.default}]"
    return text.replace("%", "%%")


# ---------------------------------------------------------------- the sources


def resolve(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Resolved:
    """Merge all sources for the parsed flags; ConfigError names the source of a bad value."""
    flags = _read_flags(args)
    variables = read_environment(environ)
    path = args.config or environ.get(CONFIG_VARIABLE) or None
    keys = {} if path is None else read_file(Path(path).expanduser())
    values: dict[str, object] = {}
    origins = dict.fromkeys(FIELDS, DEFAULT)
    for source, origin_of in (
        (keys, lambda _: str(path)),
        (variables, lambda name: ENV_PREFIX + name.upper()),
        (flags, lambda name: "MODEL" if name == "model" else flag_of(name)),
    ):
        for name, value in source.items():
            values[name] = value
            origins[name] = origin_of(name)
    return Resolved(build(values, origins), origins)


def _read_flags(args: argparse.Namespace) -> dict[str, object]:
    given = {name: getattr(args, name, None) for name in FIELDS}
    if args.model_flag is not None:
        if args.model is not None and args.model != args.model_flag:
            raise ConfigError(f"two models given: {args.model} and --model {args.model_flag}")
        given["model"] = args.model_flag
    return {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


def read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """FREETOKEN_* variables by field; an empty one counts as not set."""
    found: dict[str, object] = {}
    known = [CONFIG_VARIABLE, *(ENV_PREFIX + name.upper() for name in FIELDS)]
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{suggest(variable, known)}")
        if value:
            found[variable.removeprefix(ENV_PREFIX).lower()] = value
    return found


def read_file(path: Path) -> dict[str, object]:
    """The keys of a TOML file by field."""
    table = tomlfile.read(path)
    found: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise ConfigError(f"unknown key {key} in {path}{suggest(key, FIELDS)}")
        if name in found:
            raise ConfigError(f"{path} sets {name} twice, with dashes and with underscores")
        if isinstance(value, bool) and bool not in leaves_of(FIELDS[name].annotation):
            raise ConfigError(f"{name} = {str(value).lower()} in {path} must not be a boolean")
        found[name] = value
    return found


def build(values: Mapping[str, object], origins: Mapping[str, str]) -> Config:
    """Validate; ConfigError says which value from which source breaks which limit."""
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_explain(error, values, origins)) from None


def _explain(
    error: ValidationError, values: Mapping[str, object], origins: Mapping[str, str]
) -> str:
    """One line for the first field at fault; a union's alternatives are joined."""
    problems = error.errors(include_url=False, include_context=False)
    location = problems[0]["loc"]
    if not location:
        return problems[0]["msg"].removeprefix("Value error, ")
    name = str(location[0])
    wishes = dict.fromkeys(
        _wish(problem["msg"]) for problem in problems if problem["loc"][0] == name
    )
    if name in SECRETS:
        wishes = {"must be visible ASCII characters without blanks": None}
    wish = " or ".join([next(iter(wishes)), *(w.removeprefix("must be ") for w in [*wishes][1:])])
    return f"{_place(name, values[name], origins[name])} {wish} ({FIELDS[name].description})"


def _wish(message: str) -> str:
    """pydantic's `Input should be a valid integer, unable to …` as `must be a valid integer`."""
    return re.sub(r"^\w+ should ", "must ", message).split(", unable to parse")[0]


def _place(name: str, value: object, origin: str) -> str:
    """The value as its source wrote it; never a secret's."""
    shown = "…" if name in SECRETS else value
    if origin == ENV_PREFIX + name.upper():
        return f"{origin}={shown}"
    if origin in ("MODEL", flag_of(name)):
        return f"{origin} {shown}"
    return f"{name} = {shown!r} in {origin}"
