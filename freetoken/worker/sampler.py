"""The sampling state of all rows, and one token for each row of a step.

Owns the parameters (host arrays), the output position of each row, and the token counts that
penalties need. What may be drawn is in kernels/sample_ops.py, the random stream in philox.py. Log
probabilities are of the model's raw logits, before bias, penalties and temperature, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.kernels.reference_sample import MIN_TEMPERATURE, Filters, draw
from freetoken.wire.messages import Logprobs, Sampling, pack_ids
from freetoken.worker.counts import RowIds, TokenCounts
from freetoken.worker.faults import StepError
from freetoken.worker.filters import Penalties, penalize
from freetoken.worker.philox import uniforms

Flags = npt.NDArray[np.bool_]

@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: [n] int64 · logprobs: one per row (None where not asked), or empty if none asked."""

    tokens: Tensor
    logprobs: tuple[Logprobs | None, ...]


class Sampler:
    """Row ids are `[0, max_rows)`; a row must be started before it is sampled."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._stops: list[Tensor | None] = [None] * max_rows
        self._bias: list[tuple[Tensor, Tensor] | None] = [None] * max_rows
        self._counts = TokenCounts(max_rows, vocab_size, device)
        self._position = np.zeros(max_rows, np.int64)
        self._seed = np.zeros(max_rows, np.uint64)
        self._min_tokens = np.zeros(max_rows, np.int64)
        self._num_logprobs = np.full(max_rows, -1, np.int64)  # below 0: none asked
        self._is_random = np.zeros(max_rows, np.bool_)
        self._is_penalized = np.zeros(max_rows, np.bool_)
        self._is_biased = np.zeros(max_rows, np.bool_)
        self._top_k = np.zeros(max_rows, np.int64)
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
        self._seed[row_id] = sampling.seed or 0
        self._is_random[row_id] = sampling.temperature >= MIN_TEMPERATURE
        self._top_k[row_id] = min(sampling.top_k, self._vocab_size)
        self._floats["temperature"][row_id] = sampling.temperature
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
            self._stops[row_id] = torch.tensor(stops, device=self._device)
        bias = {token: add for token, add in sampling.logit_bias if 0 <= token < self._vocab_size}
        if bias:
            self._is_biased[row_id] = True
            self._bias[row_id] = (
                torch.tensor(list(bias), device=self._device),
                torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device),
            )

    def forget(self, row_id: int) -> None:
        self._stops[row_id] = self._bias[row_id] = None
        self._counts.forget(row_id)
        self._min_tokens[row_id] = 0
        self._num_logprobs[row_id] = -1
        self._is_random[row_id] = self._is_penalized[row_id] = self._is_biased[row_id] = False

    def sample(self, row_ids: RowIds, logits: Tensor) -> Sampled:
        """One token for each row, and its output position moves on.

        logits: [n, V] f32, row i for `row_ids[i]`, not changed. Raises StepError before anything
        has changed.
        """
        positions = self._position[row_ids]
        held = positions < self._min_tokens[row_ids]
        penalized = self._is_penalized[row_ids]
        edited = held | penalized | self._is_biased[row_ids]
        scores = self._edit(row_ids, logits, held, penalized) if edited.any() else logits
        tokens = self._choose(row_ids, scores, self._is_random[row_ids])
        if penalized.any():
            self._counts.add(row_ids[penalized], tokens[torch.from_numpy(penalized)])
        self._position[row_ids] = positions + 1
        return Sampled(tokens, self._logprobs(row_ids, logits, tokens))

    def _choose(self, row_ids: RowIds, scores: Tensor, random: Flags) -> Tensor:
        if not random.any():
            return self._argmax(row_ids, scores)
        if random.all():
            return self._draw(row_ids, scores)
        is_random = torch.from_numpy(random).to(self._device)
        tokens = torch.empty(len(row_ids), dtype=torch.int64, device=self._device)
        tokens[is_random] = self._draw(row_ids[random], scores[is_random])
        tokens[~is_random] = self._argmax(row_ids[~random], scores[~is_random])
        return tokens

    def _argmax(self, row_ids: RowIds, scores: Tensor) -> Tensor:
        best, tokens = scores.max(dim=-1)
        _check(row_ids, best.isfinite())
        return tokens

    def _draw(self, row_ids: RowIds, scores: Tensor) -> Tensor:
        filters = Filters(
            self._read("temperature", row_ids),
            torch.from_numpy(self._top_k[row_ids]).to(self._device),
            self._read("top_p", row_ids),
            self._read("min_p", row_ids),
        )
        numbers = uniforms(self._seed[row_ids], self._position[row_ids].astype(np.uint64))
        tokens, is_sound = draw(scores, filters, torch.from_numpy(numbers).to(self._device))
        _check(row_ids, is_sound)
        return tokens

    def _edit(
        self,
        row_ids: RowIds,
        logits: Tensor,
        held: Flags,
        penalized: Flags,
    ) -> Tensor:
        scores = logits.clone()
        for index in self._is_biased[row_ids].nonzero()[0].tolist():
            bias = self._bias[row_ids[index]]
            assert bias is not None
            scores[index].index_add_(0, *bias)
        if penalized.any():
            chosen = row_ids[penalized]
            picked = torch.from_numpy(penalized.nonzero()[0])
            penalties = Penalties(
                self._read("repetition", chosen),
                self._read("presence", chosen),
                self._read("frequency", chosen),
            )
            scores[picked] = penalize(scores[picked], *self._counts.read(chosen), penalties)
        for index in held.nonzero()[0].tolist():
            stops = self._stops[row_ids[index]]
            assert stops is not None
            scores[index, stops] = -torch.inf
        return scores

    def _logprobs(
        self, row_ids: RowIds, logits: Tensor, tokens: Tensor
    ) -> tuple[Logprobs | None, ...]:
        asked = self._num_logprobs[row_ids]
        rows = (asked >= 0).nonzero()[0]
        if not len(rows):
            return ()
        picked = torch.from_numpy(rows)
        logprobs = logits[picked].log_softmax(dim=-1)
        sampled = logprobs.gather(1, tokens[picked][:, None])[:, 0].tolist()
        top, top_ids = logprobs.topk(int(asked.max()), dim=-1)
        found: list[Logprobs | None] = [None] * len(row_ids)
        for i, index in enumerate(rows.tolist()):
            count = int(asked[index])
            found[index] = Logprobs(
                sampled[i], pack_ids(top_ids[i, :count].tolist()), tuple(top[i, :count].tolist())
            )
        return tuple(found)

    def _read(self, name: str, row_ids: RowIds) -> Tensor:
        return torch.from_numpy(self._floats[name][row_ids]).to(self._device)


def _check(row_ids: RowIds, is_sound: Tensor) -> None:
    if not is_sound.all():
        bad = row_ids[~is_sound.cpu().numpy()].tolist()
        raise StepError(
            f"the logits of rows {bad} leave nothing to draw from (NaN, infinite, or every token "
            f"excluded)"
        )
