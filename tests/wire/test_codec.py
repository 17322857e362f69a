from __future__ import annotations

import random
import struct
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.wire.codec import MAX_FRAME_BYTES, WireError, decode, encode
from freetoken.wire.messages import (
    Abort,
    Beat,
    Failed,
    Hello,
    Logprobs,
    Message,
    Phase,
    Role,
    Sampling,
    StepMode,
    StepPlan,
    StepResult,
    StepStats,
    Submit,
    TokenDelta,
    Tokens,
    pack_ids,
    split_ids,
    unpack_ids,
)

EXAMPLES: list[Message] = [
    Submit(
        "r", pack_ids([1, 2]), None, Sampling(logit_bias=((3, -1.5),), stop_ids=(0,)), "salt", 2
    ),
    Abort("r"),
    Tokens((TokenDelta("r", pack_ids([5]), (Logprobs(-0.1, pack_ids([5]), (-0.1,)),), 3),), 900),
    Failed("r", "queue_full", "busy", None, 2.0),
    StepPlan(1, 2, StepMode.PASS, b"", ((1, 2),), (), (), (), pack_ids([0]), pack_ids([9]), (0, 4)),
    StepResult(1, 2, StepMode.ON_DEMAND, b"", b"", (None,), StepStats(5), 7),
    Hello(1, Role.WORKER, "worker-1", 42),
    Beat("b", 1, 2, Phase.LOADING, "shard", 3, 4),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_field_more_or_less_is_malformed(message: Message) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    required = [f.required for f in msgspec.structs.fields(type(message))]
    for changed in ([*fields, 0], fields[: sum(required)], ["Unknown", *fields[1:]], []):
        with pytest.raises(WireError, match="malformed frame"):
            decode(msgspec.msgpack.encode(changed))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_field_of_another_type_is_malformed(message: Message) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    for at in range(1, len(fields)):
        wrong: object = {"no": "such"}
        with pytest.raises(WireError):
            decode(msgspec.msgpack.encode([*fields[:at], wrong, *fields[at + 1 :]]))


def test_every_message_has_a_tag_of_its_own() -> None:
    tags = [msgspec.inspect.type_info(kind).tag for kind in get_args(Message)]  # type: ignore[attr-defined]
    assert len(set(tags)) == len(tags) == 15


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_message_or_to_a_wire_error(frame: bytes) -> None:
    try:
        decode(frame)
    except WireError:
        return


def test_messages_with_flipped_bits_never_raise_anything_else() -> None:
    rng = random.Random(3)
    for message in EXAMPLES:
        for _ in range(300):
            frame = bytearray(encode(message))
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            try:
                decode(bytes(frame))
            except WireError:
                continue


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x92\xa5Abort\xa2\xff\xfe",
        b"\x92\xa5Abort\xa1r trailing",
    ],
)
def test_hostile_frames_are_malformed_and_cost_nothing(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


def test_a_frame_beyond_the_limit_is_not_even_read() -> None:
    with pytest.raises(WireError, match=f"the limit is {MAX_FRAME_BYTES}"):
        decode(bytes(MAX_FRAME_BYTES + 1))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert pack_ids(unpack_ids(pack_ids(ids))) == pack_ids(ids)
    assert split_ids(pack_ids(ids)) == tuple(pack_ids([one]) for one in ids)


def test_ids_are_little_endian_and_int32() -> None:
    assert pack_ids([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"\0\0\0")
    with pytest.raises(struct.error):
        split_ids(b"\0\0\0")
