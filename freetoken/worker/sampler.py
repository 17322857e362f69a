"""The sampling state of all rows, and one token for each row of a step.

Owns the parameters (host arrays), the output position of each row, and the token counts that
penalties need. The draw is in kernels/sample_ops.py, the random stream in stream.py. Log
probabilities are of the model's raw logits, before bias, penalties and temperature, as in vLLM. On
a GPU nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.kernels.reference_sample import MIN_TEMPERATURE
from freetoken.kernels.sample_ops import sample
from freetoken.wire.messages import Logprobs, Sampling, pack_ids
from freetoken.worker.counts import RowIds, TokenCounts
from freetoken.worker.faults import StepError
from freetoken.worker.filters import Penalties, penalize
from freetoken.worker.stream import UniformStream
from freetoken.worker.transfer import to_device, to_host

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """In host memory: count: [n], how many likeliest are asked for, below 0 where none are; of
    the m rows that ask, in order: sampled [m], top [m, k] and top_ids [m, k]."""

    count: npt.NDArray[np.int64]
    sampled: Tensor
    top: Tensor
    top_ids: Tensor

    def read(self) -> tuple[Logprobs | None, ...]:
        """One per row."""
        found: list[Logprobs | None] = [None] * len(self.count)
        sampled, top, top_ids = self.sampled.tolist(), self.top.tolist(), self.top_ids.tolist()
        for i, index in enumerate((self.count >= 0).nonzero()[0].tolist()):
            count = int(self.count[index])
            found[index] = Logprobs(sampled[i], pack_ids(top_ids[i][:count]), tuple(top[i][:count]))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: [n] int64 on the device, -1 where nothing could be drawn · logprobs: None if no row
    asked. On a GPU neither may be read before an event recorded after this."""

    tokens: Tensor
    logprobs: LogprobTensors | None


@dataclass(frozen=True, slots=True)
class DrawArrays:
    """What the sampling kernel takes, [n] each: f32, int32, f32, f32 and f64. A temperature of 0
    is greedy."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]


class Sampler:
    """Row ids are `[0, max_rows)`; a row must be started before it is sampled."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._stops: list[Tensor | None] = [None] * max_rows
        self._bias: list[tuple[Tensor, Tensor] | None] = [None] * max_rows
        self._counts = TokenCounts(max_rows, vocab_size, device)
        self._position = np.zeros(max_rows, np.int64)
        self._stream = UniformStream(max_rows)
        self._min_tokens = np.zeros(max_rows, np.int64)
        self._num_logprobs = np.full(max_rows, -1, np.int64)  # below 0: none asked
        self._is_random = np.zeros(max_rows, np.bool_)
        self._is_penalized = np.zeros(max_rows, np.bool_)
        self._is_biased = np.zeros(max_rows, np.bool_)
        self._top_k = np.zeros(max_rows, np.int32)
        self._floats = {
            name: np.zeros(max_rows, np.float32)
            for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
        }

    def start(
        self, row_id: int, sampling: Sampling, num_output: int, prompt_ids: bytes, output_ids: bytes
    ) -> None:
        """A row begins, or goes on after a preemption with `num_output` tokens made before."""
        self.forget(row_id)
        self._position[row_id] = num_output
        self._stream.start(row_id, sampling.seed or 0)
        self._is_random[row_id] = sampling.temperature >= MIN_TEMPERATURE
        self._top_k[row_id] = min(sampling.top_k, self._vocab_size)
        is_random = bool(self._is_random[row_id])
        self._floats["temperature"][row_id] = sampling.temperature if is_random else 0.0
        self._floats["top_p"][row_id] = sampling.top_p
        self._floats["min_p"][row_id] = sampling.min_p
        self._floats["repetition"][row_id] = sampling.repetition_penalty
        self._floats["presence"][row_id] = sampling.presence_penalty
        self._floats["frequency"][row_id] = sampling.frequency_penalty
        if sampling.logprobs is not None:
            self._num_logprobs[row_id] = min(sampling.logprobs, self._vocab_size)
        self._start_masks(row_id, sampling)
        penalties = (sampling.presence_penalty, sampling.frequency_penalty)
        if sampling.repetition_penalty != 1 or any(penalties):
            self._is_penalized[row_id] = True
            self._counts.start(row_id, prompt_ids, output_ids)

    def _start_masks(self, row_id: int, sampling: Sampling) -> None:
        # Ids beyond the vocabulary can never be drawn: there is nothing to bias or to forbid.
        stops = [token for token in sampling.stop_ids if 0 <= token < self._vocab_size]
        if stops and sampling.min_tokens > 0:
            self._min_tokens[row_id] = sampling.min_tokens
            self._stops[row_id] = to_device(np.array(stops, np.int64), self._device)
        bias = {token: add for token, add in sampling.logit_bias if 0 <= token < self._vocab_size}
        if bias:
            self._is_biased[row_id] = True
            self._bias[row_id] = (
                to_device(np.array(list(bias), np.int64), self._device),
                to_device(np.array(list(bias.values()), np.float32), self._device),
            )

    def forget(self, row_id: int) -> None:
        self._stops[row_id] = self._bias[row_id] = None
        self._counts.forget(row_id)
        self._min_tokens[row_id] = 0
        self._num_logprobs[row_id] = -1
        self._is_random[row_id] = self._is_penalized[row_id] = self._is_biased[row_id] = False

    def needs_logits(self, row_ids: RowIds) -> bool:
        """Whether `sample` must see the logits: the kernel draws, it neither edits nor tells."""
        return bool(
            (self._position[row_ids] < self._min_tokens[row_ids]).any()
            or self._is_penalized[row_ids].any()
            or self._is_biased[row_ids].any()
            or (self._num_logprobs[row_ids] >= 0).any()
        )

    def read(self, row_ids: RowIds) -> DrawArrays:
        """The parameters of the next draw, and its random numbers."""
        floats = self._floats
        uniforms = np.zeros(len(row_ids))
        drawn = self._is_random[row_ids]
        if drawn.any():
            rows = row_ids[drawn]
            uniforms[drawn] = self._stream.read(rows, self._position[rows])
        return DrawArrays(
            floats["temperature"][row_ids],
            self._top_k[row_ids],
            floats["top_p"][row_ids],
            floats["min_p"][row_ids],
            uniforms,
        )

    def advance(self, row_ids: RowIds) -> None:
        """A token of each row was drawn elsewhere, with what `read` gave."""
        self._position[row_ids] += 1

    def sample(self, row_ids: RowIds, logits: Tensor) -> Sampled:
        """One token for each row, and its output position moves on.

        logits: [n, V] f32, row i for `row_ids[i]`, not changed. On the CPU raises StepError if a
        row has nothing to draw from; on a GPU its token is -1. Nothing has changed after an error.
        """
        positions = self._position[row_ids]
        held = positions < self._min_tokens[row_ids]
        penalized = self._is_penalized[row_ids]
        edited = held | penalized | self._is_biased[row_ids]
        scores = self._edit(row_ids, logits, held, penalized) if edited.any() else logits
        tokens = self._draw(row_ids, scores)
        sampled = Sampled(tokens, self._logprobs(row_ids, logits, tokens))
        if penalized.any():
            picked = to_device(penalized.nonzero()[0], self._device)
            self._counts.add(row_ids[penalized], tokens[picked])
        self._position[row_ids] = positions + 1
        return sampled

    def _draw(self, row_ids: RowIds, scores: Tensor) -> Tensor:
        on_cpu = self._device.type == "cpu"
        if on_cpu and not self._is_random[row_ids].any():
            best, tokens = scores.max(dim=-1)
            is_sound = best.isfinite()
        else:
            tokens = sample(scores, *self._parameters(row_ids))
            is_sound = tokens >= 0
        if on_cpu and not is_sound.all():
            raise nothing_to_draw(row_ids[~is_sound.numpy()].tolist())
        return tokens

    def _parameters(self, row_ids: RowIds) -> tuple[Tensor, ...]:
        """What `read` gives, on the device."""
        arrays = self.read(row_ids)
        names = ("temperature", "top_k", "top_p", "min_p", "uniforms")
        return tuple(to_device(getattr(arrays, name), self._device) for name in names)

    def _edit(self, row_ids: RowIds, logits: Tensor, held: Flags, penalized: Flags) -> Tensor:
        scores = logits.clone()
        for index in self._is_biased[row_ids].nonzero()[0].tolist():
            bias = self._bias[row_ids[index]]
            assert bias is not None
            scores[index].index_add_(0, *bias)
        if penalized.any():
            chosen = row_ids[penalized]
            picked = to_device(penalized.nonzero()[0], self._device)
            penalties = Penalties(
                self._read("repetition", chosen),
                self._read("presence", chosen),
                self._read("frequency", chosen),
            )
            edited = penalize(scores[picked], *self._counts.read(chosen), penalties)
            scores.index_copy_(0, picked, edited)
        for index in held.nonzero()[0].tolist():
            stops = self._stops[row_ids[index]]
            assert stops is not None
            scores[index].index_fill_(0, stops, -torch.inf)
        return scores

    def _logprobs(self, row_ids: RowIds, logits: Tensor, tokens: Tensor) -> LogprobTensors | None:
        asked = self._num_logprobs[row_ids]
        rows = (asked >= 0).nonzero()[0]
        if not len(rows):
            return None
        picked = to_device(rows, self._device)
        logprobs = logits[picked].log_softmax(dim=-1)
        sampled = logprobs.gather(1, tokens[picked].clamp(min=0)[:, None])[:, 0]
        top, top_ids = logprobs.topk(int(asked.max()), dim=-1)
        return LogprobTensors(asked, to_host(sampled), to_host(top), to_host(top_ids))

    def _read(self, name: str, row_ids: RowIds) -> Tensor:
        return to_device(self._floats[name][row_ids], self._device)


def nothing_to_draw(rows: list[int]) -> StepError:
    """The error of a step whose `rows` have no distribution."""
    return StepError(
        f"the logits of rows {rows} leave nothing to draw from (NaN, infinite, or every token "
        f"excluded)"
    )
