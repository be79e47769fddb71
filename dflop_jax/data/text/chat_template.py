"""Published chat templates (jinja), rendered in a sandbox as `transformers` renders them.

A template is code from data: it runs in jinja's immutable sandbox, sees plain text only and cannot
reach Python. Two noncharacters of Unicode, which no real text holds, mark what
`{% generation %}` encloses; they are gone from the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"
# Templates may ask for the day (Llama 3.1): the same tokens every day make runs repeatable.
TODAY = date(2024, 7, 26)

Span = tuple[int, int]
Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template; `variables` (bos_token, eos_token, ...) are known to it.

    Raises:
      ValueError: `source` is no jinja template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], name: str) -> None:
        self._name, self._variables = name, dict(variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as e:
            raise ValueError(f"{name}: chat template is no valid jinja ({_line(e)})") from None
        self.takes_parts = self._shows([{"type": "text", "text": "probe"}])
        self.takes_texts = self._shows("probe")

    def render(
        self,
        messages: Sequence[Message],
        variables: Message = MappingProxyType({}),
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, tuple[Span, ...]]:
        """The text, and the spans of characters that the template itself calls generated.

        Args:
          variables: of this conversation, such as its tools.

        ValueError when the template refuses the messages.
        """
        try:
            text = self._template.render(
                **{"tools": None, "documents": None, **self._variables, **variables},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as e:  # a template may fail in any way on what it was not written for
            raise ValueError(f"{self._name}: chat template fails ({_line(e)})") from None
        return _take_marks(text)

    def _shows(self, content: Any) -> bool:
        """Whether the text of a message with this content, a text or parts, is rendered."""
        try:
            text, _ = self.render([{"role": "user", "content": content}])
        except ValueError:
            return False
        return "probe" in text and "'type'" not in text


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: its text, between marks."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _environment() -> ImmutableSandboxedEnvironment:
    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json  # jinja's own escapes HTML
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def _take_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    plain: list[str] = []
    ends: list[int] = []  # where marks stood: begin, end, begin, ...
    for part in text.replace(END, BEGIN).split(BEGIN):
        plain.append(part)
        ends.append((ends[-1] if ends else 0) + len(part))
    return "".join(plain), tuple(zip(ends[0::2], ends[1::2], strict=False))


def _line(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
