"""Token ids to text, piece by piece, never half a character, equal to decoding all at once.

Two ways. Byte-level vocabularies (nearly all current models) map every token to bytes: an
incremental UTF-8 decoder is exact and the cost is one table look-up a token. For everything else
the text of a short window of tokens is decoded with and without the new ones, and the difference is
new text. Knows nothing of requests.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8
"""Tokens that end in half a character are held back up to here: a character has at most four bytes,
so more of them are no beginning of anything."""

CONTEXT_TOKENS = 5


class Detokenizer(Protocol):
    """One text in the making."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; empty while a character is half there."""

    def finish(self) -> str:
        """What was held back, half characters as U+FFFD. The text ends here."""


class TokenBytes(dict[int, bytes]):
    """What each token of a byte-level vocabulary stands for; filled as ids come up."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    @classmethod
    def of(cls, backend: Backend) -> TokenBytes | None:
        """None if the tokenizer's decoder is not plain byte-level."""
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return cls(backend) if decoder.get("type") == "ByteLevel" else None

    def __missing__(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            value = b""
        else:
            try:
                value = bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # an added token with characters of its own
                value = token.encode()
        self[token_id] = value
        return value


class ByteDetokenizer:
    """Exact for byte-level vocabularies."""

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        token_bytes, skipped = self._token_bytes, self._skipped
        return self._utf8.decode(b"".join([token_bytes[i] for i in ids if i not in skipped]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any decoder whose text depends on a few tokens of context only.

    `_window[:_num_said]` are tokens whose text is out already; they keep a decoder from treating
    the next token as the first of a text. A run of byte tokens that starts with a whole character
    and turns out to be invalid later is the one case that differs from one-shot decoding: the
    character stays.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skipped: frozenset[int],
        context_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window = [i for i in context_ids[-4 * CONTEXT_TOKENS :] if i not in skipped]
        self._window = self._window[-CONTEXT_TOKENS:]
        self._num_said = len(self._window)
        self._said = decode(self._window)

    def push(self, ids: Iterable[int]) -> str:
        pieces = []
        for token_id in ids:
            if token_id not in self._skipped:
                self._window.append(token_id)
                pieces.append(self._advance())
        return "".join(pieces)

    def finish(self) -> str:
        return self._decode(self._window)[len(self._said) :]

    def _advance(self) -> str:
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            num_held = len(self._window) - self._num_said
            if num_held <= MAX_HELD_TOKENS:
                return ""
            # No character begins that far back; the last three tokens may still begin one.
            held = self._window[-3:]
            text = self._decode(self._window[:-3])
            new = text[len(self._said) :]
            self._window, self._num_said, self._said = held, 0, ""
            return new
        if len(text) <= len(self._said):
            return ""
        new = text[len(self._said) :]
        self._window = self._window[self._num_said :]
        self._num_said = len(self._window)
        self._said = self._decode(self._window)
        return new


def _byte_alphabet() -> dict[str, int]:
    """What byte-level BPE writes for each byte (GPT-2's bytes_to_unicode), turned round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
