"""Proves at every start that this model's class computes here what it computes in transformers.

A miniature of the model's own config gets random weights and runs through plain transformers and
through our path: several rows in one flat batch, chunks past the window, a prefix hit, decode, and
passes. Whatever differs is refused, so no list of families is needed and nothing is served wrong.
This is in fp32, where only the order of sums may differ. Then the steps are repeated in the type
that is served, where roundings may differ, but not err by much more than transformers' own. It all
runs on the device that serves, with the kernels that serve, but for compilation and graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from freetoken.errors import ConfigError, EngineError
from freetoken.experts.bank import RowBank
from freetoken.experts.layout import ExpertLayout
from freetoken.model.assemble import ExpertsMode, Weights, assemble, own_banks
from freetoken.model.build import build_meta_model
from freetoken.model.checkpoint import read_config, resolve_dtype
from freetoken.model.conversion import DtypePlan
from freetoken.model.miniature import VOCAB_SIZE, miniatures
from freetoken.model.plain import build_plain, plain_logits, randomise
from freetoken.model.served import ServedModel
from freetoken.model.shape import measure_shape
from freetoken.model.trial import Part, Trial

# In fp32 what differs is the order of sums, 1e-6; an error of any kind shows as 1e-2 and more.
TOLERANCE = 1e-4
ROW_LENGTHS = (23, 15, 9)
SHARED_TOKENS = 6
NUM_PADDING = 2
# In a type of fewer bits, how much more than transformers' own our error may be, against fp32.
ERROR_FACTOR = 3.0
ERROR_FLOOR = 0.02
# Two experts may score so alike that the order of sums decides: then other weights are tried.
SEEDS = (0, 1)


@dataclass(frozen=True, slots=True)
class _Path:
    """How we compute: on a GPU with kernels, as `use_kernels` does on a CPU."""

    experts: ExpertsMode
    device: str
    use_kernels: bool | None


def check_model(
    path: Path, *, experts: ExpertsMode, dtype: str = "auto", device: str = "cpu"
) -> None:
    """Check the model in `path`, reading its config only. Raises EngineError naming the class.

    Its shape has been found already (load.read_shape). `dtype` is the option's value. Takes about a
    second and a few miniatures of memory.
    """
    config = read_config(path)
    _check_cleanly(config, _Path(experts, device, None), resolve_dtype(path, config, dtype))


def check_config(
    config: PreTrainedConfig,
    *,
    experts: ExpertsMode,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    use_kernels: bool | None = None,
) -> None:
    """Like check_model, for a config that is not on disk. `use_kernels`: see assemble."""
    measure_shape(build_meta_model(deepcopy(config), torch.float32))
    _check_cleanly(config, _Path(experts, device, use_kernels), dtype)


def _check_cleanly(config: PreTrainedConfig, ours: _Path, dtype: torch.dtype) -> None:
    with _exactly():
        _check(config, ours, dtype)
    if ours.device != "cpu":
        gc.collect()  # miniatures are held by cycles
        torch.cuda.empty_cache()


@contextmanager
def _exactly() -> Iterator[None]:
    """fp32 products in fp32. One thread: miniatures are so small that more would only wait."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    # Set to what it is, it is no longer what torch.compile has seen: compiled code is made again.
    is_exact = precision == "highest"
    torch.set_num_threads(1)
    if not is_exact:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if not is_exact:
            torch.set_float32_matmul_precision(precision)


def _check(config: PreTrainedConfig, ours: _Path, dtype: torch.dtype) -> None:
    name = config.model_type
    reasons = []
    for small in miniatures(config):
        try:
            plain = build_plain(small, torch.float32, ours.device)
            randomise(plain, SEEDS[0])
            expected = [plain_logits(plain, row) for row in _rows()]
        except Exception as error:
            # A size that this architecture cannot have: the next miniature shrinks less.
            reasons.append(" ".join(str(error).split()))
            continue
        name = type(plain).__name__
        failures = [_compare(small, plain, expected, ours)]
        for seed in SEEDS[1:]:
            if failures[-1] is None:
                break
            randomise(plain, seed)
            expected = [plain_logits(plain, row) for row in _rows()]
            failures.append(_compare(small, plain, expected, ours))
        failure = failures[-1]
        if failure is None and dtype != torch.float32:
            failure = _compare_rounded(small, plain, expected, ours, dtype)
        if failure is not None:
            raise EngineError(f"{name} cannot be served: {failure}")
        return
    raise EngineError(
        f"{name} cannot be checked against transformers: no small copy of its config runs"
        + "".join(f"; {reason}" for reason in reasons[-1:])
    )


def _compare(
    config: PreTrainedConfig,
    plain: PreTrainedModel,
    expected: list[torch.Tensor],
    path: _Path,
) -> str | None:
    """What differs between transformers and our path, or None."""
    try:
        ours = _our_model(config, plain, path)
        scenarios = {
            "rows in one batch, chunks, decode": _run_steps(ours),
            "a prefix hit": _run_prefix_hit(ours),
            "a pass": _run_pass(ours),
            "a pass with steps in between": _run_open_pass(ours),
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


def _compare_rounded(
    config: PreTrainedConfig,
    plain: PreTrainedModel,
    expected: list[torch.Tensor],
    path: _Path,
    dtype: torch.dtype,
) -> str | None:
    """What is wrong with our path in `dtype`, or None; `expected` is in fp32."""
    rounded = build_plain(config, dtype, path.device)
    rounded.load_state_dict(plain.state_dict())
    try:
        theirs = torch.cat([plain_logits(rounded, row) for row in _rows()])
    except Exception:
        # Random weights need not fit into this type, nor transformers run in it: nothing to learn.
        return None
    try:
        steps = _run_steps(_our_model(config, plain, path, dtype))
    except Exception as error:
        return f"in {dtype} our path fails with {type(error).__name__}: {error}"
    ours = torch.cat([steps[row] for row in range(len(ROW_LENGTHS))])
    exact = torch.cat(expected)
    allowed = ERROR_FACTOR * _token_error(theirs, exact) + ERROR_FLOOR
    found = _token_error(ours, exact)
    if found <= allowed:
        return None
    return f"in {dtype} logits err by {found:.1e} relative, allowed are {allowed:.1e}"


def _token_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The lower quartile over tokens of the relative error.

    Not the mean: where two experts score alike, roundings pick one, and that token errs by much,
    with those that attend to it.
    """
    return float(((got - exact).norm(dim=1) / exact.norm(dim=1)).quantile(0.25))


def _run_steps(ours: ServedModel) -> dict[int, torch.Tensor]:
    trial = Trial(ours, _rows(), num_padding=NUM_PADDING)
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


def _run_open_pass(ours: ServedModel) -> dict[int, torch.Tensor]:
    trial = Trial(ours, _rows())
    first, second, third = ROW_LENGTHS
    trial.step(Part(1, 4), Part(2, third - 1))
    open_pass = trial.start_pass(Part(0, first), Part(1, second - 4), chunk_tokens=7)
    try:
        is_done = open_pass.advance(1)
        trial.step(Part(2, 1))
        assert is_done or open_pass.advance()
        trial.finish_pass(open_pass)
    finally:
        open_pass.close()
    return {row: trial.logits(row) for row in range(len(ROW_LENGTHS))}


def _rows() -> list[torch.Tensor]:
    """Token ids; the second row starts like the first."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(3, VOCAB_SIZE - 3, (length,), generator=generator) for length in ROW_LENGTHS
    ]
    rows[1][:SHARED_TOKENS] = rows[0][:SHARED_TOKENS]
    return rows


def _our_model(
    config: PreTrainedConfig,
    plain: PreTrainedModel,
    path: _Path,
    dtype: torch.dtype = torch.float32,
) -> ServedModel:
    model = build_meta_model(deepcopy(config), dtype)
    shape = measure_shape(model)
    make_bank = own_banks(path.experts) if path.device == "cpu" else _pinned_bank
    weights = Weights(model, path.experts, path.device, make_bank)
    dtypes = DtypePlan(model)
    for name, tensor in plain.state_dict().items():
        weights.put_whole(name, tensor.to(dtypes.of(name)))
    weights.finish(frozenset())
    num_slots = max(1, shape.num_experts // 2) if path.experts == "slots" else None
    return assemble(
        model,
        shape,
        weights,
        device=path.device,
        num_slots=num_slots,
        context_tokens=max(ROW_LENGTHS),
        use_kernels=path.use_kernels,
    )


def _pinned_bank(layer: int, name: str, layout: ExpertLayout, num_experts: int) -> RowBank:
    """A MakeBank: in memory that torch pins, and frees when the miniature goes."""
    size = (num_experts, layout.row_bytes)
    bank = RowBank(layout, num_experts, torch.empty(size, dtype=torch.uint8, pin_memory=True))
    bank.is_pinned = True
    return bank
