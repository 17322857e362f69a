"""`ft config`: every option, its value, and what set it. Reads and starts nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from freetoken import options, tomlfile
from freetoken.config import Config

DESCRIPTION = "Print every option, its value and what set it."
MASK = "********"


def run(argv: Sequence[str]) -> int:
    parser = options.Parser("ft config", DESCRIPTION)
    options.add_options(parser)
    parser.add_argument(
        "--toml", action="store_true", help="print a commented TOML file for --config"
    )
    args = parser.parse(argv)
    resolved = options.resolve(args)
    print(as_toml(resolved) if args.toml else as_table(resolved), end="")
    return 0


def as_table(resolved: options.Resolved) -> str:
    """Three columns: option, value, origin."""
    rows = [
        (name, _show(name, value), resolved.origins[name])
        for name, value in _values(resolved.config)
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "".join(
        f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}\n" for name, value, origin in rows
    )


def as_toml(resolved: options.Resolved) -> str:
    """A file that `--config` takes; a secret that is set is left out and its comment says so."""
    return tomlfile.dump(
        (
            (name, None, f"{_comment(name)}; set, not shown")
            if name in options.SECRETS and value is not None
            else (name, value, _comment(name))
            for name, value in _values(resolved.config)
        ),
        with_unset=True,
    )


def dump(config: Config) -> str:
    """The file that a launched process reads: everything that differs from nothing, secrets too."""
    return tomlfile.dump(((name, value, None) for name, value in _values(config)), with_unset=False)


def _values(config: Config) -> Iterator[tuple[str, object]]:
    for name in options.FIELDS:
        yield name, getattr(config, name)


def _show(name: str, value: object) -> str:
    if value is None:
        return "-"
    return MASK if name in options.SECRETS else tomlfile.format_value(value)


def _comment(name: str) -> str:
    return options.FIELDS[name].description or ""
