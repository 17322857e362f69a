"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from starlette.requests import Request

from freetoken.api.answer import Answer, event, now_s
from freetoken.api.chat_messages import check_messages
from freetoken.api.chat_template import RESERVED
from freetoken.api.choice import Piece
from freetoken.api.engine import EngineClient
from freetoken.api.errors_http import invalid
from freetoken.api.generation import Prompt, start
from freetoken.api.http import encode_json, read_json
from freetoken.api.openai_logprobs import chat_logprobs
from freetoken.api.openai_sampling import check_prompt_ids
from freetoken.api.openai_schema import ChatRequest, parse
from freetoken.api.served import Served
from freetoken.api.tokenizer import INLINE_CHARS, Tokenizer


class ChatEndpoint:
    """Messages to a prompt, the generation, and the chat form of its answer."""

    def __init__(self, served: Served, engine: EngineClient) -> None:
        self._served = served
        self._engine = engine

    async def create(self, http_request: Request) -> Answer:
        request = parse(await read_json(http_request), ChatRequest)
        name = self._served.check_name(request.model)
        ids = await self._prompt_ids(request)
        form = ChatFormat(name, request, self._served.tokenizer)
        prompt = Prompt(ids, is_continued=False)
        generation = start(request, [prompt], form.request_id, self._served, self._engine)
        return Answer(generation, form, is_streaming=bool(request.stream))

    async def _prompt_ids(self, request: ChatRequest) -> list[int]:
        template = self._served.template
        if template is None:
            raise invalid(
                "the model has no chat template, so messages cannot become a prompt; "
                "use /v1/completions",
                "messages",
            )
        messages = check_messages(request.messages, knows_developer=template.knows_developer)
        kwargs = request.chat_template_kwargs or {}
        if taken := sorted(RESERVED.intersection(kwargs)):
            raise invalid(f"chat_template_kwargs may not set {taken[0]}", "chat_template_kwargs")
        tokenizer = self._served.tokenizer

        def render_and_encode() -> list[int]:
            text = template.render(messages, kwargs)
            return tokenizer.encode(text, add_special_tokens=False)

        if sum(len(message["content"]) for message in messages) <= INLINE_CHARS:
            ids = render_and_encode()
        else:
            ids = await asyncio.to_thread(render_and_encode)
        check_prompt_ids(ids, self._served.vocab_size, "messages")
        return ids


class ChatFormat:
    """Chunks with the constant parts rendered once: a token costs one small encoding."""

    prompt_field = "messages"

    def __init__(self, name: str, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self.request_id = f"chatcmpl-{secrets.token_hex(12)}"
        options = request.stream_options
        self.with_usage = bool(options and options.include_usage)
        self._name = name
        self._created_s = now_s()
        self._tokenizer = tokenizer
        self._has_logprobs = bool(request.logprobs)
        head = encode_json(self._header("chat.completion.chunk"))
        self._head = (
            b"data: " + head[:-1].replace(b"%", b"%%") + b',"choices":[{"index":%d,"delta":'
        )
        self._tail = b'}],"usage":null}\n\n' if self.with_usage else b"}]}\n\n"

    def opening(self, num_choices: int) -> bytes:
        rest = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"".join(self._head % index + rest + self._tail for index in range(num_choices))

    def events(self, index: int, piece: Piece) -> bytes:
        head = self._head % index
        parts: list[bytes] = []
        if piece.text or piece.entries:
            logprobs = b"null"
            if piece.entries:
                logprobs = encode_json(chat_logprobs(piece.entries, self._tokenizer))
            text = encode_json(piece.text)
            parts += (head, b'{"content":', text, b'},"logprobs":', logprobs)
            parts += (b',"finish_reason":null', self._tail)
        if piece.finish is not None:
            finish = b'{},"logprobs":null,"finish_reason":"%s"' % piece.finish.encode()
            parts += (head, finish, self._tail)
        return b"".join(parts)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return event(self._header("chat.completion.chunk") | {"choices": [], "usage": usage})

    def whole(self, choices: list[list[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._header("chat.completion") | {
            "choices": [self._choice(index, pieces) for index, pieces in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        logprobs = None
        if self._has_logprobs:
            entries = [entry for piece in pieces for entry in piece.entries]
            logprobs = chat_logprobs(entries, self._tokenizer)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish,
        }

    def _header(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self._created_s,
            "model": self._name,
        }
