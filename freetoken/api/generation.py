"""An HTTP request at work: its prompts at the engine, its choices as text, its usage.

Both OpenAI endpoints start one with `start`, then take pieces until there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.api.calls import Call
from freetoken.api.choice import Choice, Piece
from freetoken.api.engine import EngineClient
from freetoken.api.errors_http import invalid
from freetoken.api.openai_sampling import max_tokens_of, to_sampling
from freetoken.api.openai_schema import ChatRequest, CompletionRequest, stop_strings
from freetoken.api.served import Served
from freetoken.api.stops import StopScanner, StopSet
from freetoken.errors import ErrorCode, RequestError
from freetoken.wire.messages import FinishReason, Sampling, Submit, pack_ids

MAX_SEQUENCES = 1024
"""Prompts times n in one HTTP request."""

MAX_PROMPT_TOKENS = 1 << 24
"""Of all sequences of one HTTP request: each is sent to the scheduler with its prompt, so a long
prompt with a large n would take gigabytes before the scheduler could refuse it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`is_continued`: the answer goes on with the prompt's text, blanks and all."""

    ids: Sequence[int]
    is_continued: bool


class Generation:
    """The choices of a request, numbered prompt by prompt, n for each."""

    def __init__(self, call: Call, choices: list[Choice], num_per_prompt: int) -> None:
        self.call = call
        self.choices = choices
        self.prompt_tokens = 0
        self._num_per_prompt = num_per_prompt

    async def wait_accepted(self) -> None:
        """Until the engine has taken everything; raises what it refused."""
        accepted = await self.call.accepted()
        firsts = accepted[:: self._num_per_prompt]
        self.prompt_tokens = sum(message.prompt_tokens for message in firsts)

    async def pieces(self) -> list[tuple[int, Piece]]:
        """What is new, by choice; empty when all have ended."""
        while True:
            deltas = await self.call.deltas()
            pieces = []
            for index, delta in deltas:
                choice = self.choices[index]
                if choice.finish is not None:
                    continue  # came before the engine knew of our stop string
                if delta.finish_reason is FinishReason.ABORT:
                    raise RequestError(ErrorCode.ENGINE_UNAVAILABLE, "the engine dropped this")
                piece = choice.feed(delta)
                if piece.finish is not None:
                    self.call.stop(index)
                pieces.append((index, piece))
            if pieces or not deltas:
                return pieces

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; a prompt counts once however many choices it has."""
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self._num_per_prompt])
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def start(
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
    request_id: str,
    served: Served,
    engine: EngineClient,
) -> Generation:
    """Hand everything to the engine; it has not said yet whether it takes it."""
    num_per_prompt = request.n or 1
    num_sequences = len(prompts) * num_per_prompt
    if num_sequences > MAX_SEQUENCES:
        raise invalid(
            f"{len(prompts)} prompts with n={num_per_prompt} make {num_sequences} choices, the "
            f"limit is {MAX_SEQUENCES}; send several requests",
            "n",
        )
    num_tokens = num_per_prompt * sum(len(prompt.ids) for prompt in prompts)
    if num_tokens > MAX_PROMPT_TOKENS:
        raise invalid(
            f"{num_sequences} choices have {num_tokens} prompt tokens together, the limit is "
            f"{MAX_PROMPT_TOKENS}; send several requests",
            "n",
        )
    stops = stop_strings(request)
    stop_set = StopSet(stops) if stops else None
    samplings = [to_sampling(request, served, choice) for choice in range(num_per_prompt)]
    submits: list[Submit] = []
    choices: list[Choice] = []
    for prompt in prompts:
        packed = pack_ids(prompt.ids)
        for sampling in samplings:
            submits.append(
                Submit(
                    f"{request_id}-{len(submits)}",
                    packed,
                    max_tokens_of(request),
                    sampling,
                    request.cache_salt,
                    request.priority or 0,
                )
            )
            choices.append(_choice(request, prompt, sampling, served, stop_set))
    return Generation(engine.submit(submits), choices, num_per_prompt)


def _choice(
    request: ChatRequest | CompletionRequest,
    prompt: Prompt,
    sampling: Sampling,
    served: Served,
    stop_set: StopSet | None,
) -> Choice:
    scanner = None
    if stop_set is not None:
        include = bool(request.include_stop_str_in_output)
        scanner = StopScanner(stop_set, include_stop=include)
    detokenizer = served.tokenizer.detokenizer(
        skip_special_tokens=request.skip_special_tokens is not False,
        context_ids=prompt.ids[-32:] if prompt.is_continued else (),
    )
    return Choice(detokenizer, scanner, frozenset(sampling.stop_ids), sampling.min_tokens)
