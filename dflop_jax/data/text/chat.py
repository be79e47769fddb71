"""Conversations to tokens with the tokenizer's own files: tokenizer.json, its configuration and
chat template. The tokens equal `transformers`' `apply_chat_template`; only answers are supervised.

Text of a record that spells a special token stays plain text: it cannot end a turn or open one.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.data.media.kind import Kinds, tag_of
from dflop_jax.data.media.kinds import BUILT_IN
from dflop_jax.data.text.chat_template import (
    BEGIN_MARK,
    END_MARK,
    ChatTemplate,
    Message,
    PictureFrame,
    Span,
)
from dflop_jax.data.text.tokenize import BREAK, NO_FIELDS, ROLES, TemplateFields, TokenRun
from dflop_jax.data.text.tokenizer_files import (
    FileEncoding,
    FolderTokenizer,
    check_embedding,
    encode_text,
    parse_tokenizer,
    resolve_tokenizer,
)

log = logging.getLogger(__name__)

MARKS = re.compile(f"[{BEGIN_MARK}{END_MARK}]")
UNANSWERED = -2  # of text that is no answer
LOOKS_SPECIAL = re.compile(r"<\|\w+\|>")


class ChatTokenizer(FileEncoding):
    """The tokenizer and chat template of a model's folder.

    Args:
      embedding_size: rows of the model's token embedding, to tell a foreign tokenizer.
      kinds: of media that conversations may have.
      resolved: what `transformers` made of the folder, where another process has asked it.

    Raises:
      ValueError: see `resolve_tokenizer`; a template that is no jinja, or an embedding of another
        size.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        embedding_size: int | None = None,
        kinds: Kinds = BUILT_IN,
        resolved: FolderTokenizer | None = None,
    ) -> None:
        self.folder, self._tag = Path(folder), tag_of(kinds)
        self._kinds = {kind.name: kind for kind in kinds}
        self.resolved = resolved or resolve_tokenizer(self.folder)
        named, source = self.resolved.named, self.resolved.template
        backend = self.resolved.backend.encode()
        super().__init__(parse_tokenizer(backend))
        if embedding_size is not None:
            check_embedding(self.vocab_size, embedding_size, str(self.folder))
        self.template = source
        self._template = ChatTemplate(source, named, str(self.folder))
        self._has_warned = False
        self._picture_frame = PictureFrame.from_config(named, source)
        self._tokens = {kind: self._placeholder(kind, named) for kind in self._kinds}
        begin, end, *frame = (
            (self._id(named[name]),) if name in named else ()
            for name in ("start_image_token", "end_image_token", "boi_token", "eoi_token")
        )
        # ids that begin and end a picture, where the configuration names such (InternVL)
        self.picture_ends = (begin, end) if begin else None
        self.frame_ends = tuple(frame)  # a frame of a clip, where it names such (Gemma 4)
        self._collect_special()
        pad = named.get("pad_token") or named.get("eos_token")
        self.pad_id = self._id(pad) if pad else 0
        self.placeholder_id = self.pad_id  # stands where media are; none is embedded
        self.im_end_id = self._id(named["eos_token"]) if "eos_token" in named else -1
        self.digest = hashlib.blake2b(backend + source.encode(), digest_size=8).hexdigest()

    def media_id(self, kind: str) -> int:
        """Id of the token that stands for a kind of media; ValueError if there is none."""
        token = self._tokens[kind]
        if token is None:
            raise ValueError(
                f"{self.folder}: no token stands for {kind} "
                f"({', '.join(self._kinds[kind].placeholders)}); "
                f"add {kind}_token to tokenizer_config.json, or leave out such samples"
            )
        return self._id(token)

    def ids_of(self, token: str) -> tuple[int, ...]:
        """The id of a special token; () if there is none of that name."""
        number = self._tokenizer.token_to_id(token)
        return () if number is None else (number,)

    def encode_chat(
        self, messages: Sequence[Message], variables: Message = NO_FIELDS.variables
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [t], the answer that each is of, int [t]) of messages as templates take them
        ("role" and "content", which may be a list of parts). Media are one placeholder token each.
        Answers count from 0; -1 where the template does not tell them apart, `UNANSWERED` of text
        that is no answer.

        Args:
          variables: of the template, such as tools.
        """
        text, spans = self._render(messages, variables)
        ids, characters = self._encode_rendered(text)
        self._check_texts(messages, text)
        if spans:
            n_answers = sum(message["role"] == "assistant" for message in messages)
            are_told_apart = len(spans) == n_answers
            ended = self._add_end_tokens(text, spans)
            numbered = [(k if are_told_apart else -1, span) for k, span in enumerate(ended)]
        else:
            numbered = self._answer_spans(messages, variables, text)
        begins, ends = characters.T
        answers = np.full(len(ids), UNANSWERED)
        for number, (begin, end) in numbered:
            inside = np.flatnonzero((ends > begin) & (begins < end))
            if len(inside):
                answers[inside[0] : inside[-1] + 1] = number
        return ids, answers

    def encode_turns(
        self, turns: Sequence[tuple[str, str]], fields: TemplateFields = NO_FIELDS
    ) -> tuple[TokenRun, ...]:
        """Pieces of LLaVA-format turns (human, gpt, system, tool) with what else the record gives
        the template; the k-th tag of all becomes medium k, wherever the template puts it.
        ValueError when the template leaves out a medium."""
        kinds = [kind for _, text in turns for kind in self._tag.findall(text)]
        messages, variables = self.messages(turns, fields)
        return self._split(kinds, *self.encode_chat(messages, variables))

    def encode_question(self, question: str) -> tuple[TokenRun, ...]:
        """Pieces of a user's turn, up to where the template has the answer begin."""
        messages, variables = self.messages([("human", question)], NO_FIELDS)
        text, _ = self._render(messages, variables, add_generation_prompt=True)
        ids, _ = self._encode_rendered(text)
        return self._split(self._tag.findall(question), ids, np.full(len(ids), UNANSWERED))

    def rendered(self, messages: Sequence[Message], variables: Message) -> str:
        """The template's text, as it stands before pictures are framed."""
        return self._template.render(messages, variables)[0]

    def reads_variable(self, name: str) -> bool:
        """Whether the template asks for a field of messages, or a variable, of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    def _split(
        self, kinds: Sequence[str], ids: np.ndarray, answers: np.ndarray
    ) -> tuple[TokenRun, ...]:
        """Pieces of a rendered conversation with media of these kinds."""
        media_by_token: dict[int, list[int]] = {}
        for k, kind in enumerate(kinds):
            media_by_token.setdefault(self.media_id(kind), []).append(k)
        queues = {i: iter(ks) for i, ks in media_by_token.items()}
        runs: list[TokenRun] = []
        start = 0
        for position in [*np.flatnonzero(np.isin(ids, list(media_by_token))).tolist(), len(ids)]:
            runs += _split_by_answer(ids[start:position], answers[start:position])
            start = position + 1
            if position < len(ids):
                medium = next(queues[int(ids[position])], -1)
                if medium < 0:
                    raise ValueError(f"{self.folder}: chat template repeats a medium")
                medium_run = TokenRun(medium=medium)
                if self.picture_ends and self._kinds[kinds[medium]].wrapped:
                    begin, end = self.picture_ends
                    runs += [TokenRun(begin), medium_run, TokenRun(end)]
                else:
                    runs.append(medium_run)
        if sum(p.medium >= 0 for p in runs) != len(kinds):
            raise ValueError(
                f"{self.folder}: chat template leaves out media; use the chat_template.jinja "
                "of the multimodal model"
            )
        return tuple(runs)

    def messages(
        self, turns: Sequence[tuple[str, str]], fields: TemplateFields
    ) -> tuple[list[Message], Message]:
        """The turns as templates take them, and the variables."""
        further = fields.messages or ({},) * len(turns)
        messages: list[Message] = [
            {**self._escape_special(f), **self._message(*t)} for t, f in zip(turns, further)
        ]
        variables: Message = self._escape_special(fields.variables)
        return messages, variables

    def _escape_special(self, value: Any) -> Any:
        """A value of a record whose texts spell no special token."""
        if isinstance(value, str):
            return self._spelled.sub(lambda m: m[0][0] + BREAK + m[0][1:], value)
        if isinstance(value, Mapping):
            return {name: self._escape_special(v) for name, v in value.items()}
        return (
            [self._escape_special(v) for v in value] if isinstance(value, list | tuple) else value
        )

    def _message(self, role: str, text: str) -> Message:
        if MARKS.search(text):
            raise ValueError("text holds U+FDD0 or U+FDD1, which are no characters")
        content_parts: list[dict[str, str]] = []
        for k, text_or_kind in enumerate(self._tag.split(text)):
            if k % 2:
                if self.picture_ends and self._kinds[text_or_kind].preface:
                    content_parts.append(
                        {"type": "text", "text": self._kinds[text_or_kind].preface}
                    )
                content_parts.append({"type": text_or_kind})
            elif text_or_kind:
                content_parts.append({"type": "text", "text": self._escape_special(text_or_kind)})
        needs_parts = (
            any(p["type"] != "text" for p in content_parts) or not self._template.takes_texts
        )
        if self._template.takes_parts and needs_parts:
            return {"role": ROLES[role], "content": content_parts}
        texts = [p.get("text") or self._tokens[p["type"]] or "" for p in content_parts]
        return {"role": ROLES[role], "content": "".join(texts)}

    def _render(
        self,
        messages: Sequence[Message],
        variables: Message,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, tuple[Span, ...]]:
        """As the template has it, pictures framed."""
        rendered = self._template.render(
            messages, variables, add_generation_prompt=add_generation_prompt
        )
        return self._picture_frame.apply(*rendered)

    def _check_texts(self, messages: Sequence[Message], rendered: str) -> None:
        """ValueError: the template leaves out the text of a message. Templates of models that think
        may leave out the thoughts."""
        for message in messages:
            content = message["content"]
            texts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
            text = self._placeholders.sub(" ", " ".join(texts))
            if text in rendered or "</think>" in text:
                continue
            if any(word not in rendered for word in set(re.findall(r"\w+", text))):
                raise ValueError(
                    f"{self.folder}: chat template leaves out text of the {message['role']}, "
                    f"{text.strip()[:40]!r}; use the chat_template.jinja of this model"
                )

    def _add_end_tokens(self, text: str, spans: Sequence[Span]) -> list[Span]:
        """The template's own spans of answers, each with the token that ends it: the special token
        behind the last answer of the text, where it follows an answer at once."""
        last = self._special.match(text, spans[-1][1])
        if last is None:
            return list(spans)
        token = last[last.lastindex or 0]
        return [(b, e + len(token) if text.startswith(token, e) else e) for b, e in spans]

    def _answer_spans(
        self, messages: Sequence[Message], variables: Message, text: str
    ) -> list[tuple[int, Span]]:
        """The answers, each with its number: the difference that each makes to the text, up to its
        end-of-turn token.

        Templates of models that think show an answer otherwise once another question follows:
        without its thoughts. Nobody would give it so, and it is not among the spans.
        """
        spans = []
        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        for number, k in enumerate(answers):
            through, _ = self._render(messages[: k + 1], variables)
            begin = self._answer_start(messages[:k], variables, through)
            is_appended = text.startswith(through)
            if not is_appended and begin is not None and k < answers[-1]:
                self._warn_about_changed_answers()
                continue
            if not is_appended or begin is None:
                raise ValueError(
                    f"{self.folder}: chat template does not only append; mark its answers with "
                    "{% generation %} ... {% endgeneration %}"
                )
            marks = list(self._special.finditer(through, begin))
            spans.append((number, (begin, marks[-1].end() if marks else len(through))))
        return spans

    def _answer_start(
        self, messages: Sequence[Message], variables: Message, through: str
    ) -> int | None:
        """Where the answer to `messages` begins in the text up to its end: behind what the prompt
        for an answer shares with that text, as a prompt may hold a thought that answers lack. None:
        the prompt shares nothing of its own."""
        prompt, _ = self._render(messages, variables, add_generation_prompt=True)
        if through.startswith(prompt):
            return len(prompt)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, through)))
        return shared if shared > len(self._render(messages, variables)[0]) else None

    def _warn_about_changed_answers(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: the chat template shows answers otherwise once another question follows (it "
                "drops their thinking): of such a chat only the last answer is trained on; mark "
                "answers with {%% generation %%} ... {%% endgeneration %%} to train on all",
                self.folder,
            )

    def _encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [t] and the characters each stands for, int [t, 2]."""
        ids: list[int] = []
        characters: list[Span] = []
        start = 0
        for match in [*self._special.finditer(text), None]:
            segment = text[start : match.start() if match else len(text)]
            unknown = LOOKS_SPECIAL.search(segment)
            if unknown:
                raise ValueError(
                    f"{self.folder}: chat template writes {unknown[0]}, which tokenizer.json "
                    "lacks; take both files from one model"
                )
            # places of the characters that stay, and the end of the segment
            staying: Sequence[int] = range(start, start + len(segment))
            if BREAK in segment:
                staying = [k for k, c in zip(staying, segment, strict=True) if c != BREAK]
            encoding = encode_text(self._tokenizer, segment.replace(BREAK, ""))
            ids += encoding.ids
            characters += [
                (staying[b], staying[e - 1] + 1) if e > b else (0, 0) for b, e in encoding.offsets
            ]
            if match:
                assert match.lastindex is not None
                ids.append(self._special_ids[match.lastindex - 1])
                characters.append(match.span(match.lastindex))
                start = match.end()
        return np.array(ids, np.int32), np.array(characters, np.int64).reshape(-1, 2)

    def _collect_special(self) -> None:
        """Patterns of the special tokens: as encoding finds them, and as text spells them."""
        placeholders = {t for t in self._tokens.values() if t}
        self._placeholders = re.compile("|".join(map(re.escape, placeholders)) or "(?!)")
        special = [
            (i, token)
            for i, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.content and (token.special or token.content in placeholders)
        ]
        special.sort(key=lambda item: -len(item[1].content))  # the longest that matches
        self._special_ids = [i for i, _ in special]
        space = {True: r"\s*", False: ""}
        patterns = (
            f"{space[t.lstrip]}({re.escape(t.content)}){space[t.rstrip]}" for _, t in special
        )
        self._special = re.compile("|".join(patterns) or "(?!)")
        spelled = [re.escape(t.content) for _, t in special]
        self._spelled = re.compile("|".join([*spelled, LOOKS_SPECIAL.pattern]))

    def _placeholder(self, kind: str, named: Mapping[str, str]) -> str | None:
        configured = named.get(f"context_{kind}_token") or named.get(f"{kind}_token")
        candidates = (configured,) if configured else self._kinds[kind].placeholders
        return next((t for t in candidates if self._tokenizer.token_to_id(t) is not None), None)

    def _id(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        assert number is not None, token
        return number


def _split_by_answer(ids: np.ndarray, answers: np.ndarray) -> list[TokenRun]:
    """Pieces of consecutive tokens that are of one answer, or of none."""
    cuts = np.flatnonzero(np.diff(answers)) + 1
    answer_runs = zip(np.split(ids, cuts), np.split(answers, cuts), strict=True)
    return [
        TokenRun(tuple(i.tolist()), a[0] > UNANSWERED, answer=max(-1, int(a[0])))
        for i, a in answer_runs
        if len(i)
    ]
