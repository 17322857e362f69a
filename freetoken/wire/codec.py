"""Messages to bytes and back: msgpack, strict, no pickle.

msgspec checks tag, arity, types and enum values while decoding; anything else is a WireError.
"""

from __future__ import annotations

import msgspec

from freetoken.errors import FreeTokenError
from freetoken.wire.messages import Message

MAX_FRAME_BYTES = 64 << 20
"""A frame beyond this is malformed: the longest prompt (2^20 tokens) takes 4 MiB."""


class WireError(FreeTokenError):
    """A frame is no message of ours. Counted and dropped; never ends a process."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """The message in `frame`; WireError says what is wrong with it."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise WireError(f"malformed frame of {len(frame)} bytes: {error}") from error
