"""Renders published chat templates (jinja) in a sandbox, like `transformers`.

A template is untrusted code. It runs in jinja's immutable sandbox, gets only plain text and cannot
reach Python. Two Unicode noncharacters, which are never in real text, mark the text inside
`{% generation %}`; they are removed from the result.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflop_jax.data import bounds

BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"
MARKS = re.compile(f"[{BEGIN_MARK}{END_MARK}]")
# Templates may read the date (Llama 3.1); a fixed date makes runs repeatable.
TODAY = date(2024, 7, 26)

Span = tuple[int, int]
Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template with `variables` (bos_token, eos_token, ...). After rendering, `written`,
    its text for a picture, is replaced by `framed`, as processors do (Gemma). ValueError: `source`
    is not a jinja template."""

    def __init__(
        self, source: str, variables: Mapping[str, str], name: str, written: str, framed: str
    ) -> None:
        self._name, self._variables = name, dict(variables)
        self._written, self._framed = written, framed
        with bounds.errors_as(f"{name}: chat template is not valid jinja"):
            self._template = _environment().from_string(source)
        self.takes_parts = self._shows([{"type": "text", "text": "probe"}])
        self.takes_texts = self._shows("probe")

    def render(
        self,
        messages: Sequence[Message],
        variables: Message = MappingProxyType({}),
        *,
        add_generation_prompt: bool = False,
        frames_pictures: bool = True,
    ) -> tuple[str, list[Span]]:
        """Return the text, and the spans of characters that `{% generation %}` encloses.
        `variables` are of this conversation, such as tools. ValueError: the template fails."""
        with bounds.errors_as(f"{self._name}: chat template fails"):
            marked = self._template.render(
                **{"tools": None, "documents": None, **self._variables, **variables},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        texts = MARKS.split(marked)
        marks = [*accumulate(map(len, texts))]  # positions of the marks: begin, end, begin, ...
        text, spans = "".join(texts), [*zip(marks[0::2], marks[1::2])]
        if not (self._written and frames_pictures):
            return text, spans
        starts = [match.start() for match in re.finditer(re.escape(self._written), text)]
        longer = len(self._framed) - len(self._written)
        shifted = [[p + longer * bisect_left(starts, p) for p in span] for span in spans]
        return text.replace(self._written, self._framed), [(b, e) for b, e in shifted]

    def _shows(self, content: Any) -> bool:
        """Return whether the template renders the text of such a content, a text or parts."""
        try:
            text, _ = self.render([{"role": "user", "content": content}])
        except ValueError:
            return False
        return "probe" in text and "'type'" not in text


class _Generation(jinja2.ext.Extension):
    """Jinja extension that puts marks around `{% generation %} ... {% endgeneration %}`."""

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
    environment.filters["tojson"] = to_json  # jinja's own filter escapes HTML
    environment.globals.update(raise_exception=fail, strftime_now=TODAY.strftime)
    return environment


def picture_frame(named: Mapping[str, str], template: str) -> tuple[str, str]:
    """Return (a template's text for a picture, its replacement by processors), "" if no tokens are
    named that begin and end a picture. Gemma 3's templates write the begin token, Gemma 4's the
    picture token."""
    begin, picture, end = (named.get(f"{name}_token") for name in ("boi", "image", "eoi"))
    if not (begin and picture and end):
        return "", ""
    if picture in template:
        return picture, f"{begin}{picture}{end}"
    return begin, f"\n\n{begin}{picture}{end}\n\n"
