"""`ft chat`: talk to any OpenAI-compatible server from the terminal.

With a prompt, or with text piped in, it gives one answer and ends. In a terminal it goes on:
Ctrl-C stops an answer, Ctrl-D ends.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from freetoken.api.client import ChatClient, ClientError, Message
from freetoken.options import Parser

DEFAULT_URL = "http://127.0.0.1:1919"
STOPPED = 130
"""Exit code after Ctrl-C, as shells give it (128 + SIGINT)."""

Write = Callable[[str], None]

_CONTROL = {code: None for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Left out on a terminal: a model must not move the cursor or change the title."""


def run(argv: list[str]) -> int:
    """The command with its arguments; returns the exit code."""
    args = _parser().parse(argv)
    write = _writer()
    try:
        client = ChatClient(args.url, args.api_key)
    except ClientError as error:
        return _fail(error)
    with contextlib.closing(client):
        try:
            prompt = _prompt(args.prompt)
            model = args.model or _first_model(client)
            chat = Chat(client, model, args.system, _options(args))
            if prompt is not None:
                chat.ask(prompt, write)
                write("\n")
            else:
                converse(chat, input, write)
        except ClientError as error:
            return _fail(error)
        except KeyboardInterrupt:
            write("\n")
            return STOPPED
        except BrokenPipeError:  # whoever read our output has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    return 0


class Chat:
    """A conversation so far."""

    def __init__(
        self, client: ChatClient, model: str, system: str | None, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.messages: list[Message] = []
        self._client = client
        self._options = options
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def ask(self, text: str, write: Write) -> None:
        """One turn. What was answered stays in the conversation, also when it was stopped or
        broke off; a turn without any answer is forgotten."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        answer = self._client.chat(self.model, self.messages, self._options)
        try:
            with contextlib.closing(answer):
                for piece in answer:
                    pieces.append(piece)
                    write(piece)
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()


def converse(chat: Chat, read_line: Callable[[str], str], write: Write) -> None:
    """Turns until the end of input."""
    write(f"{chat.model} · Ctrl-C stops an answer, Ctrl-D ends\n")
    while True:
        try:
            text = read_line("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            continue
        if not text:
            continue
        try:
            chat.ask(text, write)
        except KeyboardInterrupt:
            write(" …")
        except ClientError as error:
            write(f"error: {error}")
        write("\n\n")


def _parser() -> Parser:
    parser = Parser(
        "ft chat", "Chat with an OpenAI-compatible server in the terminal.", epilog=None
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="answer this and end")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument("--model", help="a name that the server offers (default: its first)")
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is deterministic")
    parser.add_argument("--top-p", type=float, metavar="P", help="share of probability kept")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="repeat an answer")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("FREETOKEN_API_KEY") or os.environ.get("OPENAI_API_KEY"),
        metavar="KEY",
        help="default: FREETOKEN_API_KEY, else OPENAI_API_KEY in the environment",
    )
    return parser


def _options(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "max_tokens": args.max_tokens,
        "seed": args.seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def _prompt(argument: str | None) -> str | None:
    """The argument, else what is piped in; None for a conversation in a terminal.

    With an argument stdin is not read: where it is a pipe that nobody closes, that would hang.
    """
    text = argument
    if text is None:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - line editing and history for input()
            return None
        text = sys.stdin.read()
    if not text.strip():
        raise ClientError("the input is empty; give a prompt")
    return text


def _first_model(client: ChatClient) -> str:
    models = client.models()
    if not models:
        raise ClientError(f"{client.url} offers no model; name one with --model")
    return models[0]


def _writer() -> Write:
    """To stdout, at once; on a terminal without control characters."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")
    is_terminal = out.isatty()

    def write(text: str) -> None:
        out.write(text.translate(_CONTROL) if is_terminal else text)
        out.flush()

    return write


def _fail(error: ClientError) -> int:
    print(f"ft chat: error: {error}", file=sys.stderr)
    return 1
