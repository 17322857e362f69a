"""Compiles a loaded model's layers and makes sure that they still compute what they did.

The self-check runs layers as they are. Compiled code differs from them by roundings; anything else,
and a model that torch.compile cannot take, means that this model is served without it.
"""

from __future__ import annotations

import time

import torch
from torch._dynamo.utils import counters

from freetoken import log
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial

EXTEND_TOKENS = 48
"""A first extend of this size: kernels that are made for any number of tokens suit it best."""
NUM_DECODES = 2
OTHER_TOKENS = (2, 3)
"""Of further steps. The first of them may compile something else, the second may not."""
PAGE_SIZE = 16
# Of the lower quartile over tokens. Where two experts score alike, roundings pick one, and later
# layers carry that on: how much roundings do in this model is seen from a pass, which rounds at
# other places than the same tokens on demand (0.17 in bf16 with 16 layers of random weights).
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
NOISE_FACTOR = 2.0
# Two unrelated sets of logits differ by 1.4: from here on it would be no check.
MAX_TOLERANCE = 0.7

_log = log.get(__name__)


def compile_checked(model: ServedModel) -> bool:
    """Compile the layers of `model`; False: it runs as it is, the log says why.

    Takes about 10 s for each kind of layer the first time, and a few seconds from the cache.
    """
    started_s = time.monotonic()
    expected = _logits(model)
    noise = _difference(_pass_logits(model), expected)
    allowed = min(MAX_TOLERANCE, max(TOLERANCE[model.shape.dtype], NOISE_FACTOR * noise))
    try:
        model.compile_layers()
        difference = _difference(_logits(model), expected)
        is_dynamic = _serves_all_sizes(model)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        # Whatever the compiler makes of a class that it does not know: serving goes on without.
        return _give_up(model, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if not difference <= allowed:
        reason = f"logits differ by {difference:.1e} relative, allowed are {allowed:.1e}"
        return _give_up(model, reason)
    if not is_dynamic:
        return _give_up(model, "each number of tokens would be compiled apart")
    seconds = time.monotonic() - started_s
    _log.info(log.event("compile.done", seconds=seconds, difference=difference, noise=noise))
    return True


def _give_up(model: ServedModel, reason: str) -> bool:
    model.run_eagerly()
    _log.warning("layers run without torch.compile, about half as fast: %s", reason)
    return False


def _make_trial(model: ServedModel) -> tuple[Trial, int]:
    """A trial of one row that is always the same, and how many tokens it has."""
    generator = torch.Generator().manual_seed(0)
    length = min(EXTEND_TOKENS + NUM_DECODES, model.shape.window)
    ids = torch.randint(0, model.shape.vocab_size, (length,), generator=generator)
    return Trial(model, [ids], page_size=PAGE_SIZE), length


def _pass_logits(model: ServedModel) -> torch.Tensor:
    """[tokens, V] of a pass in two chunks."""
    trial, length = _make_trial(model)
    trial.run_pass(Part(0, length), chunk_tokens=-(-length // 2))
    return trial.logits(0)


def _logits(model: ServedModel) -> torch.Tensor:
    """[tokens, V] of an extend and of decode steps: of several tokens and of one."""
    trial, length = _make_trial(model)
    trial.step(Part(0, length - NUM_DECODES))
    for _ in range(NUM_DECODES):
        trial.step(Part(0, 1))
    return trial.logits(0)


def _serves_all_sizes(model: ServedModel) -> bool:
    """Whether what is compiled serves steps of other numbers of tokens."""
    for num_tokens in OTHER_TOKENS:
        before = counters["stats"]["unique_graphs"]
        trial, length = _make_trial(model)
        trial.step(Part(0, min(num_tokens, length)))
    return bool(counters["stats"]["unique_graphs"] == before)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).quantile(0.25))
