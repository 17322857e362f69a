#!/usr/bin/env python3
"""Replays routing traces through the slot policy, and through others to compare it with.

    python tools/replay_policy.py
    python tools/replay_policy.py --traces recorded --recording routing.npz --json out.json

LRU evicts the longest unused at each miss. Optimum: Belady's, which knows the future and may let an
expert bypass the slots. Fixed: the experts that are asked for most, never changed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import routing_traces as traces
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from routing_traces import MAKERS, Trace

from freetoken.experts.policy import SlotPolicy

RECORDING = Path(__file__).parent.parent / "tests" / "fixtures" / "routing_demo.npz"
"""Of the demo model, by record_routing.py."""
NEVER = 1 << 60
TABLE_WIDTH = 110
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Hits of each policy; misses are num_lookups less hits."""

    trace: str
    num_slots: int
    share: float
    num_lookups: int
    policy: int
    lru: int
    optimum: int
    fixed: int


def replay(trace: Trace, num_slots: int) -> int:
    """Hits of the slot policy, in the steps that count."""
    policy = SlotPolicy(num_slots)
    hits = 0
    for step, counted in zip(trace.steps, trace.is_counted, strict=True):
        for layer, experts in enumerate(step):
            hits += counted * len(policy.resolve(layer, experts).hits)
        policy.end_step()
    return hits


def replay_lru(trace: Trace, num_slots: int) -> int:
    """The longest unused goes first, but nothing that the same look-up asks for."""
    held: OrderedDict[Key, None] = OrderedDict()
    hits = 0
    for keys, counted in _accesses(trace):
        found = [key for key in keys if key in held]
        hits += counted * len(found)
        for key in found:
            held.move_to_end(key)
        for key in keys:
            if key in held or not num_slots:
                continue
            if len(held) == num_slots:
                oldest = next(iter(held))
                if oldest in keys:
                    break
                del held[oldest]
            held[key] = None
    return hits


def replay_optimum(trace: Trace, num_slots: int) -> int:
    """Keep what is asked for again soonest; one look-up of several experts is one moment."""
    held: dict[Key, int] = {}
    latest: list[tuple[int, Key]] = []
    hits = 0
    for keys, counted, next_uses in _with_next_uses(trace):
        for key in keys:
            if key in held:
                hits += counted
                held[key] = next_uses[key]
                heapq.heappush(latest, (-held[key], key))
        for key in keys:
            next_use = next_uses[key]
            if key in held or next_use == NEVER or not num_slots:
                continue
            if len(held) == num_slots:
                while held.get(latest[0][1]) != -latest[0][0]:
                    heapq.heappop(latest)
                if -latest[0][0] <= next_use:
                    continue
                del held[heapq.heappop(latest)[1]]
            held[key] = next_use
            heapq.heappush(latest, (-next_use, key))
    return hits


def replay_fixed(trace: Trace, num_slots: int) -> int:
    """The best set that is there from the beginning and stays."""
    uses = Counter(key for keys, counted in _accesses(trace) if counted for key in keys)
    return sum(count for _, count in uses.most_common(num_slots))


def compare(trace: Trace, share: float) -> Figures:
    """All policies, with slots for `share` of all experts."""
    num_slots = round(share * trace.num_layers * trace.num_experts)
    return Figures(
        trace=trace.name,
        num_slots=num_slots,
        share=share,
        num_lookups=trace.num_lookups,
        policy=replay(trace, num_slots),
        lru=replay_lru(trace, num_slots),
        optimum=replay_optimum(trace, num_slots),
        fixed=replay_fixed(trace, num_slots),
    )


def make_traces(
    names: Sequence[str], layers: int, steps: int, seed: int, recording: Path
) -> Iterator[Trace]:
    """The traces of `names`, some of them in two forms."""
    for name in names:
        if name == "uniform":
            yield traces.uniform(layers, steps, seed)
        elif name == "lru-stack":
            yield traces.lru_stack(layers, steps, seed)
            yield traces.lru_stack(layers, steps // 4, seed, rows=8)
        elif name == "cyclic":
            yield traces.cyclic(layers, steps // 10, seed)
        elif name == "topics":
            yield traces.topics(layers, steps, seed)
        elif name == "mixed":
            yield traces.mixed(layers, steps, seed)
        else:
            loaded = traces.load_recording(recording)
            yield traces.recorded(loaded)
            yield traces.recorded(loaded, rows=4)


def print_table(figures: Sequence[Figures], console: Console) -> None:
    """Hits in percent of look-ups, then the policy's over those of others."""
    table = Table(box=SIMPLE_HEAD, title="hits in % of look-ups")
    table.add_column("trace", no_wrap=True)
    columns = ["slots", "look-ups", "policy", "LRU", "fixed", "optimum"]
    for column in [*columns, "÷ LRU", "÷ fixed", "÷ optimum"]:
        table.add_column(column, justify="right", no_wrap=True)
    for one in figures:
        others = (one.lru, one.fixed, one.optimum)
        table.add_row(
            one.trace,
            f"{one.share:.0%}",
            str(one.num_lookups),
            *(f"{100 * hits / one.num_lookups:.1f}" for hits in (one.policy, *others)),
            *(f"{one.policy / hits:.3f}" if hits else "–" for hits in others),
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    figures = []
    try:
        for trace in make_traces(
            options.traces, options.layers, options.steps, options.seed, options.recording
        ):
            figures += [compare(trace, share / 100) for share in options.slots]
    except (OSError, ValueError, KeyError) as error:
        print(f"replay_policy: error: {options.recording}: {error}", file=sys.stderr)
        return 1
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    print_table(figures, console)
    if options.json:
        rows = [asdict(one) | {"misses": one.num_lookups - one.policy} for one in figures]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _accesses(trace: Trace) -> Iterator[tuple[list[Key], bool]]:
    """The keys of each look-up, and whether it counts."""
    for step, counted in zip(trace.steps, trace.is_counted, strict=True):
        for layer, experts in enumerate(step):
            yield [(layer, expert) for expert in experts], counted


def _with_next_uses(trace: Trace) -> Iterator[tuple[list[Key], bool, dict[Key, int]]]:
    """Each look-up with the number of the next one that has the key, NEVER if there is none."""
    accesses = list(_accesses(trace))
    upcoming: dict[Key, int] = {}
    next_uses: list[dict[Key, int]] = []
    for time in range(len(accesses) - 1, -1, -1):
        keys = accesses[time][0]
        next_uses.append({key: upcoming.get(key, NEVER) for key in keys})
        upcoming |= dict.fromkeys(keys, time)
    for (keys, counted), uses in zip(accesses, reversed(next_uses), strict=True):
        yield keys, counted, uses


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--traces", nargs="+", choices=MAKERS, default=MAKERS, metavar="NAME", help=str(MAKERS))
    add("--slots", nargs="+", type=float, default=[25, 50, 75], help="percent of all experts")
    add("--layers", type=int, default=4, help="of made-up traces")
    add("--steps", type=int, default=800, help="of made-up traces")
    add("--seed", type=int, default=0)
    add("--recording", type=Path, default=RECORDING, help="of record_routing.py")
    add("--json", type=Path, metavar="FILE", help="write hits and misses")
    return parser


if __name__ == "__main__":
    sys.exit(main())
