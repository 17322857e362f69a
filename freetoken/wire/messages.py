"""Every message that crosses a process boundary. No behaviour.

api → scheduler      Submit, Abort
scheduler → api      Accepted, Tokens, Failed, EngineState
scheduler → worker   StepPlan, Shutdown
worker → scheduler   WorkerReady, StepResult, WorkerFailed
anyone → scheduler   Hello, answered with Welcome or Refused
heartbeats           Beat (see beats.py)

Each Submit gets exactly one terminal message: `Failed`, or a `TokenDelta` with a finish reason.
Runs of token ids travel as bytes: int32 little-endian, see `pack_ids` (100k ids pack in 0.08 ms so,
and in 5.9 ms as a list). Messages are arrays with a tag in front; a field more or less, or of
another type, is a decoding error.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from enum import StrEnum

import msgspec

PROTOCOL_VERSION = 4
"""Raised with every change of a message; checked in Hello."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token, page or row ids as int32 little-endian bytes; OverflowError beyond int32."""
    packed = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
    if sys.byteorder == "big":
        packed = array("i", packed)
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """The inverse of `pack_ids`; ValueError if the length is no multiple of 4."""
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def split_ids(data: bytes) -> tuple[bytes, ...]:
    """Each id by itself, still as bytes; struct.error if the length is no multiple of 4."""
    return struct.unpack("4s" * (len(data) // 4), data)


class _Message(
    msgspec.Struct,
    frozen=True,
    array_like=True,
    tag=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """Values are immutable; on the wire `[tag, field, …]` in the order of the fields.

    Without cycles there is nothing for the garbage collector to find: it need not look.
    """


class _Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of a message."""


# ---------------------------------------------------------------- api → scheduler


class Sampling(_Value, frozen=True):
    """How a row's tokens are drawn. Defaults mean 'plain sampling from the model'.

    `seed` None lets the scheduler choose one. Token `i` of the output (0-based, over the whole
    request, also after a preemption) is drawn with Philox(seed, i).
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int | None = None  # 0 <= seed < 2**63
    min_tokens: int = 0  # stop ids are impossible before that many output tokens
    stop_ids: tuple[int, ...] = ()  # ends with `stop`; includes eos unless ignore_eos
    logprobs: int | None = None  # None: none; 0: of the sampled token; n: and of the n likeliest


class Submit(_Message, frozen=True):
    """One sequence to complete. `request_id` is unique among all apis (at most 128 characters)."""

    request_id: str
    prompt_ids: bytes
    max_tokens: int | None  # None: the remaining context
    sampling: Sampling
    cache_salt: str | None = None  # prefixes are shared only among equal salts
    priority: int = 0  # lower goes first; ages, see scheduler/admission.py


class Abort(_Message, frozen=True):
    """The client is gone, or a stop string was found. Unknown ids are ignored."""

    request_id: str


# ---------------------------------------------------------------- scheduler → api


class FinishReason(StrEnum):
    STOP = "stop"  # a stop id was sampled
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # answers Abort


class Accepted(_Message, frozen=True):
    """The request fits and is queued; HTTP headers may be sent now."""

    request_id: str
    prompt_tokens: int
    max_tokens: int  # as clamped


class Logprobs(_Value, frozen=True):
    """Of one sampled token: its own, and the likeliest (ids as packed bytes) with theirs."""

    sampled: float
    top_ids: bytes
    top: tuple[float, ...]


class TokenDelta(_Value, frozen=True):
    """New output tokens of one request. A sampled stop id is included as the last id."""

    request_id: str
    token_ids: bytes
    logprobs: tuple[Logprobs, ...] = ()  # one per token, when asked for
    cached_tokens: int | None = None  # in the first delta only: prompt tokens found in the cache
    finish_reason: FinishReason | None = None  # set: terminal


class Tokens(_Message, frozen=True):
    """All that one step produced for one api process."""

    deltas: tuple[TokenDelta, ...]
    step_us: int  # the worker's time for the step


class Failed(_Message, frozen=True):
    """Terminal. `code` is an errors.ErrorCode."""

    request_id: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Phase(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    CHECKING = "checking"  # self-check, warm-up
    READY = "ready"
    STALLED = "stalled"  # a step is out for longer than the stall limit
    DEAD = "dead"  # no worker


class EngineState(_Message, frozen=True):
    """Sent after Welcome, on every change of phase, and twice a second."""

    phase: Phase
    detail: str  # for people: what is being done, or what went wrong
    loaded_bytes: int
    total_bytes: int
    context_tokens: int  # effective context N; 0 before the worker is ready
    running: int
    waiting: int
    counters: dict[str, float]  # totals since start, for /metrics: names as in scheduler/counters
    given_up_pid: int = 0  # of a process that is of no use any more but may still run; 0: none


# ---------------------------------------------------------------- scheduler → worker


class StepMode(StrEnum):
    ON_DEMAND = "on_demand"  # load just the experts the tokens ask for
    PASS = "pass"  # layer by layer, each missing expert crosses the link once


class RowStart(_Value, frozen=True):
    """A row id begins a (new or resumed) request; comes with the row's first extend."""

    row_id: int
    sampling: Sampling  # seed is set
    num_output: int  # output tokens made before (after a preemption), the next Philox position
    prompt_ids: bytes  # history for penalties; empty if no penalty needs it
    output_ids: bytes


class Extend(_Value, frozen=True):
    """Tokens at positions `[cached_len, cached_len + len(token_ids))` of a row."""

    row_id: int
    cached_len: int  # tokens of the row whose k/v are in its pages already
    token_ids: bytes
    is_last: bool  # the last chunk: sample from its last token


class PageRun(_Value, frozen=True):
    """Page-table additions: `page_ids` from index `first` on."""

    row_id: int
    first: int
    page_ids: bytes


class StepPlan(_Message, frozen=True):
    """One step. Order: forget rows, copy pages, start rows, add pages, forward, sample.

    A decode row's input is the token sampled last for it, which the worker still holds; its
    position is `decode_positions[i]`.

    `layers` (0, 0): all, in one step. A pass may instead be cut into parts at layers of the
    scheduler's choice: part `[lo, hi)` runs those decoder layers for all tokens of the pass and
    pauses before layer `hi`; the part with `hi` = `WorkerReady.num_layers` is the last.
    * Each part is a plan with a step id and a result of its own. Only the last one's has tokens.
    * The first part, `lo` = 0, brings the extends. The next ones repeat them with empty
      `token_ids`, and begin where the part before ended.
    * One pass is open at a time. On-demand steps without its rows may come between its parts.
    * To forget one of its rows ends an open pass unfinished; its other rows are void from then on,
      as they are when a part fails.
    """

    step_id: int
    epoch: int
    mode: StepMode
    forget_rows: bytes
    page_copies: tuple[tuple[int, int], ...]  # (source page, destination page), whole pages
    starts: tuple[RowStart, ...]
    page_runs: tuple[PageRun, ...]
    extends: tuple[Extend, ...]
    decode_rows: bytes
    decode_positions: bytes
    layers: tuple[int, int] = (0, 0)


class Shutdown(_Message, frozen=True):
    """Finish what is queued and exit."""

    reason: str


# ---------------------------------------------------------------- worker → scheduler


class WorkerReady(_Message, frozen=True):
    """The model is loaded and checked. Page ids are `[0, num_pages)`, row ids `[0, max_rows)`;
    sentinel pages are the worker's own and not counted."""

    epoch: int
    model: str
    num_pages: int  # usable
    page_size: int
    max_rows: int
    window: int  # W: the longest sequence the model takes
    context_tokens: int  # N = min(W, usable pool tokens): what one request may use
    context_flag: str  # the option that sets N; empty: the model's own window does
    vocab_size: int
    num_layers: int  # decoder layers, between which a pass may pause
    max_step_tokens: int  # extend tokens in one on-demand step
    max_pass_tokens: int  # extend tokens in one pass
    max_on_demand_tokens: int | None  # a step with more extend tokens is a pass; None: never
    plan: dict[str, int]  # the memory plan, bytes by name


class StepStats(_Value, frozen=True):
    """What a step cost. Slot counters stay 0 where experts are computed in place."""

    step_us: int = 0
    expert_bytes: int = 0  # that crossed the link
    slot_hits: int = 0
    slot_misses: int = 0
    cpu_experts: int = 0
    distinct_experts: int = 0  # summed over layers


class StepResult(_Message, frozen=True):
    """Tokens sampled in a step, in the order: extends with is_last, then decode rows."""

    step_id: int
    epoch: int
    mode: StepMode
    row_ids: bytes
    token_ids: bytes
    logprobs: tuple[Logprobs | None, ...]  # empty if no row asked
    stats: StepStats
    max_on_demand_tokens: int | None


class FailureScope(StrEnum):
    STEP = "step"  # the rows of step_id fail, the worker goes on
    PROCESS = "process"  # the worker is ending


class WorkerFailed(_Message, frozen=True):
    scope: FailureScope
    epoch: int
    step_id: int | None
    message: str


# ---------------------------------------------------------------- hello


class Role(StrEnum):
    API = "api"
    WORKER = "worker"


class Hello(_Message, frozen=True):
    """The first message of a peer, and again when the scheduler's epoch has changed.

    `name` is new in every life of a process and the same in its beats.
    """

    protocol: int
    role: Role
    name: str
    pid: int


class Welcome(_Message, frozen=True):
    """`epoch` numbers this life of the scheduler (api) or of the worker (worker)."""

    protocol: int
    pid: int
    epoch: int


class Refused(_Message, frozen=True):
    """The peer must end; `reason` is for its last line."""

    reason: str


class Beat(_Message, frozen=True):
    """Every half second, both ways, on the heartbeat endpoint, from a thread of its own."""

    name: str
    pid: int
    epoch: int  # of the scheduler, in its answers; 0 otherwise
    phase: Phase
    detail: str
    done: int
    total: int


Message = (
    Submit
    | Abort
    | Accepted
    | Tokens
    | Failed
    | EngineState
    | StepPlan
    | Shutdown
    | WorkerReady
    | StepResult
    | WorkerFailed
    | Hello
    | Welcome
    | Refused
    | Beat
)
