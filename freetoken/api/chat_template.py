"""Chat messages to a prompt, through the checkpoint's own Jinja template.

Rendered by transformers' sandboxed environment (tojson, raise_exception, strftime_now, loop
controls), so that a template means here what it means there. Importing that part of transformers
does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from freetoken.api.errors_http import invalid
from freetoken.errors import ConfigError

RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "chat_template",
        "conversations",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
"""Names that chat_template_kwargs may not set: the template's own inputs."""


_TEMPLATE_FAULTS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What the expressions of a template raise when messages are not what they expect."""


class ChatTemplate:
    """One template of one checkpoint, compiled once."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens
        self.knows_developer = "developer" in source

    @classmethod
    def compile(cls, source: str, special_tokens: dict[str, str], path: Path) -> ChatTemplate:
        """ConfigError names the file and line of a template that does not compile."""
        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation]).parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{path}: the chat template is broken at its line {error.lineno}: {error.message}"
            ) from error
        return cls(source, special_tokens)

    def render(self, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any]) -> str:
        """The prompt up to where the assistant speaks; a 400 with the template's own complaint."""
        try:
            rendered = render_jinja_template(
                [list(messages)],
                chat_template=self._source,
                add_generation_prompt=True,
                **{**self._special_tokens, **kwargs},
            )
        except jinja2.TemplateError as error:
            raise invalid(f"the model's chat template refuses this: {error}", "messages") from error
        except _TEMPLATE_FAULTS as error:
            kind = type(error).__name__
            raise invalid(
                f"the model's chat template fails on these messages: {kind}: {error}", "messages"
            ) from error
        text: str = rendered[0][0]
        return text


class _Generation(jinja2.ext.Extension):
    """Lets `{% generation %}` parse, which transformers' environment knows too."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
