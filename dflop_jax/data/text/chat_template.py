"""Published chat templates (jinja), rendered in a sandbox as `transformers` renders them.

A template is code from data: it runs in jinja's immutable sandbox, sees plain text only and cannot
reach Python. Two noncharacters of Unicode, which no real text holds, mark what
`{% generation %}` encloses; they are gone from the result.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflop_jax.data import bounds

BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"
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
        with bounds.errors_as(f"{name}: chat template is no valid jinja"):
            self._template = _environment().from_string(source)
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
        with bounds.errors_as(f"{self._name}: chat template fails"):
            text = self._template.render(
                **{"tools": None, "documents": None, **self._variables, **variables},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        return _strip_marks(text)

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
        return f"{BEGIN_MARK}{caller()}{END_MARK}"


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


def _strip_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    plain: list[str] = []
    ends: list[int] = []  # where marks stood: begin, end, begin, ...
    for text_part in text.replace(END_MARK, BEGIN_MARK).split(BEGIN_MARK):
        plain.append(text_part)
        ends.append((ends[-1] if ends else 0) + len(text_part))
    return "".join(plain), tuple(zip(ends[0::2], ends[1::2], strict=False))


@dataclass(frozen=True)
class PictureFrame:
    """A template's text for a picture, and what processors put in its place once the template has
    been rendered (Gemma); both may be ""."""

    written: str = ""
    framed: str = ""

    @classmethod
    def from_config(cls, named: Mapping[str, str], template: str) -> PictureFrame:
        """Return that of a tokenizer whose configuration names the tokens that begin and end a
        picture: Gemma 3's templates write the former alone, Gemma 4's the picture's own token."""
        begin, picture, end = (named.get(f"{name}_token") for name in ("boi", "image", "eoi"))
        if not (begin and picture and end):
            return cls()
        if picture in template:
            return cls(picture, f"{begin}{picture}{end}")
        return cls(begin, f"\n\n{begin}{picture}{end}\n\n")

    def apply(self, text: str, spans: Sequence[Span]) -> tuple[str, tuple[Span, ...]]:
        """A rendered text with its pictures framed, and the places of its spans there."""
        if not self.written:
            return text, tuple(spans)
        starts = [match.start() for match in re.finditer(re.escape(self.written), text)]
        longer = len(self.framed) - len(self.written)

        def shift(position: int) -> int:
            return position + longer * bisect_left(starts, position)

        framed = text.replace(self.written, self.framed)
        return framed, tuple((shift(begin), shift(end)) for begin, end in spans)
