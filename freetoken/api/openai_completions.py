"""POST /v1/completions: a prompt as text, texts, token ids, or lists of those."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.requests import Request

from freetoken.api.answer import Answer, event, now_s
from freetoken.api.choice import Piece
from freetoken.api.engine import EngineClient
from freetoken.api.errors_http import invalid
from freetoken.api.generation import Prompt, start
from freetoken.api.http import encode_json, read_json
from freetoken.api.openai_logprobs import completion_logprobs
from freetoken.api.openai_sampling import check_prompt_ids
from freetoken.api.openai_schema import CompletionRequest, parse
from freetoken.api.served import Served
from freetoken.api.tokenizer import Tokenizer


class CompletionEndpoint:
    """Prompts to ids, the generation, and the completion form of its answer."""

    def __init__(self, served: Served, engine: EngineClient) -> None:
        self._served = served
        self._engine = engine

    async def create(self, http_request: Request) -> Answer:
        request = parse(await read_json(http_request), CompletionRequest)
        name = self._served.check_name(request.model)
        prompts = [
            Prompt(await self._ids(prompt), is_continued=True)
            for prompt in split_prompts(request.prompt)
        ]
        form = CompletionFormat(name, request, self._served.tokenizer)
        generation = start(request, prompts, form.request_id, self._served, self._engine)
        return Answer(generation, form, is_streaming=bool(request.stream))

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        ids = prompt
        if isinstance(ids, str):
            ids = await self._served.tokenizer.encode_async(ids, add_special_tokens=True)
        check_prompt_ids(ids, self._served.vocab_size, "prompt")
        return ids


def split_prompts(prompt: object) -> list[str | list[int]]:
    """The single prompts in any of the four forms; 400 for anything else."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, str) for part in prompt):
            return list(prompt)
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(part, list) and _are_ids(part) for part in prompt):
            return list(prompt)
    raise invalid(
        "prompt must be text, a list of texts, a list of token ids, or a list of such lists, and "
        "not empty",
        "prompt",
    )


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


class CompletionFormat:
    """Chunks with the constant parts rendered once."""

    prompt_field = "prompt"

    def __init__(self, name: str, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.request_id = f"cmpl-{secrets.token_hex(12)}"
        options = request.stream_options
        self.with_usage = bool(options and options.include_usage)
        self._header = {
            "id": self.request_id,
            "object": "text_completion",
            "created": now_s(),
            "model": name,
        }
        self._tokenizer = tokenizer
        self._num_top = request.logprobs
        head = encode_json(self._header)
        self._head = b"data: " + head[:-1].replace(b"%", b"%%") + b',"choices":[{"index":%d,"text":'
        self._tail = b'}],"usage":null}\n\n' if self.with_usage else b"}]}\n\n"

    def opening(self, num_choices: int) -> bytes:
        return b""

    def events(self, index: int, piece: Piece) -> bytes:
        if not piece.text and not piece.entries and piece.finish is None:
            return b""
        logprobs = b"null"
        if piece.entries:
            value = completion_logprobs(piece.entries, self._tokenizer, self._num_top or 0)
            logprobs = encode_json(value)
        finish = b"null" if piece.finish is None else b'"%s"' % piece.finish.encode()
        return b"".join(
            (
                self._head % index,
                encode_json(piece.text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish,
                self._tail,
            )
        )

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return event(self._header | {"choices": [], "usage": usage})

    def whole(self, choices: list[list[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._header | {
            "choices": [self._choice(index, pieces) for index, pieces in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        logprobs = None
        if self._num_top is not None:
            entries = [entry for piece in pieces for entry in piece.entries]
            logprobs = completion_logprobs(entries, self._tokenizer, self._num_top)
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish,
        }
