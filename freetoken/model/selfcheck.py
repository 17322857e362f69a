"""Proves at every start that this model's class computes here what it computes in transformers.

A miniature of the model's own config gets random weights and runs through plain transformers and
through our path: several rows in one flat batch, chunks past the window, a prefix hit, decode, and
a pass. Whatever differs is refused, so no list of families is needed and nothing is served wrong.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from freetoken.errors import ConfigError, EngineError
from freetoken.model.assemble import ExpertsMode, Weights, assemble
from freetoken.model.build import build_meta_model
from freetoken.model.checkpoint import read_config
from freetoken.model.miniature import VOCAB_SIZE, miniatures
from freetoken.model.served import ServedModel
from freetoken.model.shape import measure_shape
from freetoken.model.trial import Part, Trial

# In fp32 what differs is the order of sums, 1e-6; an error of any kind shows as 1e-2 and more.
TOLERANCE = 1e-4
ROW_LENGTHS = (23, 15, 9)
SHARED_TOKENS = 6
# Two experts may score so alike that the order of sums decides: then other weights are tried.
SEEDS = (0, 1)


def check_model(path: Path, *, experts: ExpertsMode) -> None:
    """Check the model in `path`, reading its config only. Raises EngineError naming the class.

    Takes about a second and at most MAX_BYTES of miniature, twice.
    """
    check_config(read_config(path), experts=experts)


def check_config(config: PreTrainedConfig, *, experts: ExpertsMode) -> None:
    """Like check_model, for a config that is not on disk."""
    measure_shape(build_meta_model(deepcopy(config), torch.float32))
    name = config.model_type
    reasons = []
    for small in miniatures(config):
        try:
            plain = _plain_model(small)
            expected = [_plain_logits(plain, row) for row in _rows()]
        except Exception as error:
            # A size that this architecture cannot have: the next miniature shrinks less.
            reasons.append(" ".join(str(error).split()))
            continue
        name = type(plain).__name__
        failures = [_compare(small, plain, expected, experts)]
        for seed in SEEDS[1:]:
            if failures[-1] is None:
                return
            _randomise(plain, seed)
            expected = [_plain_logits(plain, row) for row in _rows()]
            failures.append(_compare(small, plain, expected, experts))
        if failures[-1] is None:
            return
        raise EngineError(f"{name} cannot be served: {failures[-1]}")
    raise EngineError(
        f"{name} cannot be checked against transformers: no small copy of its config runs"
        + "".join(f"; {reason}" for reason in reasons[-1:])
    )


def _compare(
    config: PreTrainedConfig,
    plain: PreTrainedModel,
    expected: list[torch.Tensor],
    experts: ExpertsMode,
) -> str | None:
    """What differs between transformers and our path, or None."""
    try:
        ours = _our_model(config, plain, experts)
        scenarios = {
            "rows in one batch, chunks, decode": _run_steps(ours),
            "a prefix hit": _run_prefix_hit(ours),
            "a pass": _run_pass(ours),
        }
    except ConfigError:
        raise
    except Exception as error:
        return f"our path fails with {type(error).__name__}: {' '.join(str(error).split())}"
    for what, logits in scenarios.items():
        for row, got in logits.items():
            want = expected[row][-len(got) :]
            difference = float((got - want).norm() / want.norm())
            if not difference < TOLERANCE:
                return (
                    f"logits differ from transformers' by {difference:.1e} relative (allowed "
                    f"{TOLERANCE:.0e}) in {what}, row {row} of {len(ROW_LENGTHS)}"
                )
    return None


def _run_steps(ours: ServedModel) -> dict[int, torch.Tensor]:
    trial = Trial(ours, _rows())
    first, second, third = ROW_LENGTHS
    trial.step(Part(0, 12), Part(1, 5))
    trial.step(Part(0, 7), Part(2, third - 1), Part(1, 1))
    trial.step(Part(1, second - 7), Part(0, 1))
    trial.step(Part(0, 1), Part(1, 1), Part(2, 1))
    for _ in range(first - 21):
        trial.step(Part(0, 1))
    return {row: trial.logits(row) for row in range(len(ROW_LENGTHS))}


def _run_prefix_hit(ours: ServedModel) -> dict[int, torch.Tensor]:
    trial = Trial(ours, _rows())
    trial.step(Part(0, ROW_LENGTHS[0]))
    trial.share_prefix(0, 1, SHARED_TOKENS)
    trial.step(Part(1, ROW_LENGTHS[1] - SHARED_TOKENS - 1))
    trial.step(Part(1, 1))
    return {0: trial.logits(0), 1: trial.logits(1)}


def _run_pass(ours: ServedModel) -> dict[int, torch.Tensor]:
    trial = Trial(ours, _rows())
    first, second, _ = ROW_LENGTHS
    trial.run_pass(Part(0, first - 1), Part(1, second), chunk_tokens=5)
    trial.step(Part(0, 1))
    return {0: trial.logits(0), 1: trial.logits(1)}


def _rows() -> list[torch.Tensor]:
    """Token ids; the second row starts like the first."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(3, VOCAB_SIZE - 3, (length,), generator=generator) for length in ROW_LENGTHS
    ]
    rows[1][:SHARED_TOKENS] = rows[0][:SHARED_TOKENS]
    return rows


def _plain_model(config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        deepcopy(config),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    _randomise(model, SEEDS[0])
    return model.eval()  # type: ignore[no-any-return]


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    if not bool(logits.isfinite().all()):
        raise ValueError("random weights give infinite logits")
    return logits


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights of a size at which every part of the model shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.6 * parameter.shape[-1] ** -0.5, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(std=0.1, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():
            buffer.uniform_(-0.1, 0.1, generator=generator)


def _our_model(
    config: PreTrainedConfig, plain: PreTrainedModel, experts: ExpertsMode
) -> ServedModel:
    model = build_meta_model(deepcopy(config), torch.float32)
    shape = measure_shape(model)
    weights = Weights(model, experts, "cpu")
    for name, tensor in plain.state_dict().items():
        weights.put_whole(name, tensor)
    weights.finish(frozenset())
    num_slots = max(1, shape.num_experts // 2) if experts == "slots" else None
    return assemble(
        model,
        shape,
        weights,
        device="cpu",
        num_slots=num_slots,
        context_tokens=max(ROW_LENGTHS),
    )
