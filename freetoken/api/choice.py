"""One choice of an answer: tokens in, text that may be shown out.

Detokenises, finds stop strings, hides the stop token, and keeps logprobs beside the text that they
belong to. Knows nothing of HTTP; a `Generation` feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.api.detokenize import Detokenizer
from freetoken.api.stops import StopScanner
from freetoken.wire.messages import FinishReason, Logprobs, TokenDelta, unpack_ids


@dataclass(frozen=True, slots=True)
class Entry:
    """Logprobs of a token whose text begins at character `offset` of the choice."""

    token_id: int
    logprobs: Logprobs
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a choice. `finish` is OpenAI's finish_reason, set in the last piece."""

    text: str
    entries: tuple[Entry, ...] = ()
    finish: str | None = None


class Choice:
    """The text so far is the sum of the pieces; `finish` is None until it ended."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        scanner: StopScanner | None,
        stop_ids: frozenset[int],
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish: str | None = None
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._decoded_chars = 0
        self._shown_chars = 0
        self._pending: list[Entry] = []

    def feed(self, delta: TokenDelta) -> Piece:
        """The piece that `delta` makes. If a stop string ended the choice, `finish` is set though
        the delta had no finish reason: the engine must be told."""
        ids = unpack_ids(delta.token_ids)
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        num_unscanned = max(0, self._min_tokens - self.num_tokens)
        self.num_tokens += len(ids)
        if delta.finish_reason is FinishReason.STOP and ids and ids[-1] in self._stop_ids:
            ids.pop()  # a stop token is not shown
        if self._scanner is not None and num_unscanned:  # stop strings count after min_tokens
            head = self._decode(ids[:num_unscanned].tolist(), delta.logprobs[:num_unscanned])
            tail = self._decode(ids[num_unscanned:].tolist(), delta.logprobs[num_unscanned:])
        else:
            head, tail = "", self._decode(ids.tolist(), delta.logprobs)
        return self._show(head, tail, delta.finish_reason)

    def _decode(self, ids: list[int], logprobs: tuple[Logprobs, ...]) -> str:
        if not logprobs:
            return self._detokenizer.push(ids)
        texts = []
        for token_id, values in zip(ids, logprobs, strict=False):
            self._pending.append(Entry(token_id, values, self._decoded_chars))
            text = self._detokenizer.push((token_id,))
            self._decoded_chars += len(text)
            texts.append(text)
        return "".join(texts)

    def _show(self, head: str, tail: str, reason: FinishReason | None) -> Piece:
        if reason is not None:
            tail += self._detokenizer.finish()
        is_stopped = False
        if self._scanner is not None:
            found = self._scanner.push(tail)
            tail, is_stopped = found.text, found.is_stopped
            if reason is not None and not is_stopped:
                tail += self._scanner.finish()
        text = head + tail
        self._shown_chars += len(text)
        if is_stopped:
            self.finish = FinishReason.STOP.value
        elif reason is not None:
            self.finish = reason.value
        is_whole = self.finish is not None and not is_stopped
        return Piece(text, self._take_entries(is_whole) if self._pending else (), self.finish)

    def _take_entries(self, is_whole: bool) -> tuple[Entry, ...]:
        """Those whose text is out; at an uncut end also those that have none."""
        num_out = len(self._pending)
        if not is_whole:
            num_out = sum(entry.offset < self._shown_chars for entry in self._pending)
        out, self._pending = tuple(self._pending[:num_out]), self._pending[num_out:]
        return out
