#!/usr/bin/env python3
"""Try scheduling on a load that does not exist, on a GPU that is not there.

    python tools/simulate.py
    python tools/simulate.py --agents 16 --chats 0 --batch 0 --resident 0.2 --plot out.svg

The real scheduler, on a simulated clock, gives its plans to a worker that only says what each would
cost (sim_worker.py; by default Qwen3-30B-A3B in bf16 on a card of 48 GB behind PCIe 5). Clients are
agents, chats and batch jobs (sim_traces.py). Policies, on the same conversations:

    chunks   each chunk of a prompt is a step that streams all missing experts
    passes   a long prompt runs layer by layer, all chunks at once; short extends run on demand
    paused   the same, and between layers others have their steps
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from sim_traces import Conversation, Load, make_trace
from sim_worker import QWEN3_30B_A3B, Rig
from simulation import Answer, Policy, Seats, Simulation
from svg_plot import Panel, Series, cumulative, draw

from freetoken import log
from freetoken.experts.cost import Link, Machine
from freetoken.scheduler.pace import Fairness

POLICIES = (
    Policy("chunks", "chunk by chunk", max_pass_tokens=8192, extend_threshold=0),
    Policy("passes", "layer-major passes", max_pass_tokens=32_768),
    Policy("paused", "layer-major passes with pauses", max_pass_tokens=32_768, pauses=True),
)
PERCENTILES = (0.5, 0.9, 0.99)
TABLE_WIDTH = 110


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; nan of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarise(answers: Sequence[Answer]) -> dict[str, float]:
    """Percentiles in seconds, and the share of prompt tokens found in the cache."""
    ttft = [one.ttft_s for one in answers]
    gaps = [gap for one in answers for gap in one.gaps_s]
    prompt = sum(one.prompt_tokens for one in answers)
    figures: dict[str, float] = {"turns": len(answers)}
    for share in PERCENTILES:
        figures[f"ttft_p{share * 100:.0f}"] = percentile(ttft, share)
    for share in PERCENTILES:
        figures[f"itl_p{share * 100:.0f}"] = percentile(gaps, share)
    figures["itl_max"] = max(gaps, default=math.nan)
    figures["prefix_hits"] = sum(one.cached_tokens for one in answers) / max(1, prompt)
    return figures


def report(done: Simulation) -> dict[str, dict[str, float]]:
    """By kind of client, and of all, with what the engine did."""
    kinds = sorted({one.kind for one in done.answers})
    figures = {kind: summarise([one for one in done.answers if one.kind == kind]) for kind in kinds}
    figures["all"] = summarise(done.answers)
    counters = done.scheduler.counters
    figures["engine"] = {
        "simulated_s": done.now_s,
        "busy": done.busy_s / max(done.now_s, 1e-9),
        "output_tokens_s": counters.output_tokens / max(done.now_s, 1e-9),
        "prompt_tokens": counters.prompt_tokens,
        "expert_gb": counters.expert_bytes / 1e9,
        "steps": counters.steps,
        "pass_steps": counters.steps_pass,
        "preemptions": counters.preemptions,
        "refused": done.num_refused,
    }
    return figures


# ---------------------------------------------------------------- output


def print_report(policy: Policy, figures: dict[str, dict[str, float]]) -> None:
    engine = figures["engine"]
    table = Table(box=SIMPLE_HEAD, title=f"{policy.name}: {policy.title}", title_justify="left")
    for name in ("clients", "turns", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "max"):
        table.add_column(name, justify="left" if name == "clients" else "right")
    table.add_column("prefix hits", justify="right")
    for kind in figures:
        if kind != "engine":
            table.add_row(kind, *_cells(figures[kind]))
    console = Console(width=TABLE_WIDTH)
    console.print(table)
    console.print(
        f"{engine['simulated_s']:,.0f} s, GPU busy {engine['busy']:.0%}, "
        f"{engine['output_tokens_s']:.1f} tokens/s, {engine['expert_gb']:,.0f} GB of experts over "
        f"the link, {engine['steps']:,.0f} steps ({engine['pass_steps']:,.0f} of passes), "
        f"{engine['preemptions']:.0f} preemptions, {engine['refused']:.0f} refused\n"
    )


def _cells(figures: dict[str, float]) -> list[str]:
    times = [figures[key] for key in figures if key.startswith(("ttft", "itl"))]
    return [
        f"{figures['turns']:,.0f}",
        *("–" if math.isnan(value) else _time(value) for value in times),
        f"{figures['prefix_hits']:.0%}",
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def plot(done: Sequence[tuple[Policy, Simulation]], note: str) -> str:
    """TTFT, and the longest gap in each answer: what a reader notices."""
    ttft = [
        Series(policy.title, cumulative([one.ttft_s for one in run.answers]))
        for policy, run in done
    ]
    gaps = [
        Series(policy.title, cumulative([max(one.gaps_s) for one in run.answers if one.gaps_s]))
        for policy, run in done
    ]
    panels = [
        Panel("share of answers that begin within", "seconds", ttft),
        Panel("share of answers without a longer gap than", "seconds", gaps),
    ]
    return draw(panels, note)


# ---------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [policy.name for policy in POLICIES]
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    load = Load()
    parser.add_argument("--agents", type=int, default=load.agents, help=f"[{load.agents}]")
    parser.add_argument("--chats", type=int, default=load.chats, help=f"[{load.chats}]")
    parser.add_argument("--batch", type=int, default=load.batch, help=f"[{load.batch}]")
    parser.add_argument(
        "--duration-s",
        type=float,
        default=load.duration_s,
        help=f"within which all conversations begin [{load.duration_s:.0f}]",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the conversations [1]")
    parser.add_argument("--link", type=float, default=50.0, help="copies, GB/s [50]")
    parser.add_argument("--resident", type=float, default=0.45, help="share of the experts [0.45]")
    parser.add_argument("--vram-rate", type=float, default=1200.0, help="GB/s [1200]")
    parser.add_argument("--tflops", type=float, default=120.0, help="[120]")
    parser.add_argument("--num-tokens", type=int, default=131_072, help="k/v pool [131072]")
    parser.add_argument("--max-rows", type=int, default=32, help="[32]")
    fair = Fairness()
    parser.add_argument(
        "--max-stall-ms", type=float, default=fair.max_stall_ms, help=f"[{fair.max_stall_ms:.0f}]"
    )
    parser.add_argument(
        "--decode-share", type=float, default=fair.decode_share, help=f"[{fair.decode_share}]"
    )
    parser.add_argument(
        "--extend-threshold", type=int, help="of all policies but chunks [as a worker finds it]"
    )
    parser.add_argument("--plot", type=Path, help="write an SVG that compares the policies")
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser


def _tuned(policy: Policy, args: argparse.Namespace) -> Policy:
    """`policy` with what the flags say."""
    threshold = policy.extend_threshold
    if threshold is None:
        threshold = args.extend_threshold
    fairness = Fairness(args.max_stall_ms, args.decode_share)
    return replace(policy, extend_threshold=threshold, fairness=fairness)


def simulate(
    trace: Sequence[Conversation], rig: Rig, seats: Seats, policy: Policy, seed: int
) -> Simulation:
    run = Simulation(trace, rig, seats, policy, seed)
    run.run()
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    log.setup("simulate", "ERROR")
    trace = make_trace(Load(args.agents, args.chats, args.batch, args.duration_s), args.seed)
    machine = Machine(Link.of_copy(args.link * 1e9), args.vram_rate * 1e9, args.tflops * 1e12)
    rig = Rig(QWEN3_30B_A3B, machine, args.resident)
    seats = Seats(args.num_tokens, args.max_rows)
    done: list[tuple[Policy, Simulation]] = []
    figures: dict[str, object] = {}
    for policy in POLICIES:
        if policy.name in args.policies:
            run = simulate(trace, rig, seats, _tuned(policy, args), args.seed)
            done.append((policy, run))
            figures[policy.name] = made = report(run)
            print_report(policy, made)
    if args.plot:
        note = (
            f"simulated: {args.agents} agents, {args.chats} chats, {args.batch} documents; "
            f"{args.link:g} GB/s link, {args.resident:.0%} of the experts resident"
        )
        args.plot.write_text(plot(done, note), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
