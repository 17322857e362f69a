#!/usr/bin/env python3
"""Records which experts a model's tokens ask for while it answers prompts, for replay_policy.py.

    python tools/record_routing.py routing.npz                     the demo model
    python tools/record_routing.py routing.npz --model PATH --new-tokens 300

transformers generates, one conversation after the other; every token of prompt and answer counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from routing_traces import Recording, save_recording
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from freetoken.demo.build import ensure_demo
from freetoken.errors import FreeTokenError
from freetoken.model.experts import experts_modules, num_experts

PROMPTS = Path(__file__).parent.parent / "tests" / "fixtures" / "prompts.json"


class RoutingHooks:
    """Collects the ids [T, K] that each experts module is called with."""

    def __init__(self, model: nn.Module) -> None:
        modules = [module for _, module in experts_modules(model)]
        if not modules:
            raise FreeTokenError("the model has no experts that transformers dispatches")
        self.num_experts = num_experts(modules[0])
        self._seen: list[list[torch.Tensor]] = [[] for _ in modules]
        for seen, module in zip(self._seen, modules, strict=True):
            module.register_forward_pre_hook(
                lambda _, args, kwargs, seen=seen: seen.append(
                    (args[1] if len(args) > 1 else kwargs["top_k_index"]).cpu()
                ),
                with_kwargs=True,
            )

    def take(self) -> np.ndarray:
        """[T, L, K]: all tokens since the last call."""
        ids = torch.stack([torch.cat(seen) for seen in self._seen], dim=1)
        for seen in self._seen:
            seen.clear()
        return ids.numpy().astype(np.uint16 if self.num_experts > 256 else np.uint8)


@torch.inference_mode()
def record(path: Path, prompts: Sequence[str], new_tokens: int, seed: int) -> Recording:
    """Answer each prompt with sampling at temperature 0.7, up to `new_tokens` tokens."""
    torch.manual_seed(seed)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    hooks = RoutingHooks(model)
    conversations = []
    for number, prompt in enumerate(prompts):
        print(f"\r{number + 1} of {len(prompts)}", end="", file=sys.stderr, flush=True)
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=True, temperature=0.7, top_p=0.9
        )
        conversations.append(hooks.take())
    print(file=sys.stderr)
    return Recording(hooks.num_experts, conversations)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        path = options.model or ensure_demo(report=lambda line: print(line, file=sys.stderr))
        prompts = [one["chat"] for one in json.loads(options.prompts.read_text()) if "chat" in one]
        recording = record(path, prompts[: options.num_prompts], options.new_tokens, options.seed)
    except (FreeTokenError, OSError, ValueError) as error:
        print(f"record_routing: error: {error}", file=sys.stderr)
        return 1
    save_recording(options.output, recording)
    print(f"{options.output}: {recording.num_tokens} tokens", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("output", type=Path, help=".npz file to write")
    add("--model", type=Path, help="directory of a checkpoint; default: the demo")
    add("--prompts", type=Path, default=PROMPTS, help='JSON list of {"chat": "text"}')
    add("--num-prompts", type=int, default=16)
    add("--new-tokens", type=int, default=160, help="of each answer")
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
