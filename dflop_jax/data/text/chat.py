"""Conversations to tokens with the tokenizer's own files: tokenizer.json, its configuration and
chat template. The tokens equal `transformers`' `apply_chat_template`; only answers are supervised.

Text of a record that spells a special token stays plain text: it cannot end a turn or open one.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.data.media.kind import BUILT_IN, Kinds, tag_of
from dflop_jax.data.text.chat_template import MARKS, ChatTemplate, Message, Span, picture_frame
from dflop_jax.data.text.tokenize import (
    BREAK,
    NO_FIELDS,
    ROLES,
    FileEncoding,
    FolderTokenizer,
    TemplateFields,
    Tokenizer,
    TokenRun,
    check_embedding,
    parse_tokenizer,
    resolve_tokenizer,
)

log = logging.getLogger(__name__)

LOOKS_SPECIAL = re.compile(r"<\|\w+\|>")
NOTHING = "(?!)"  # a pattern that matches nowhere


class ChatTokenizer(FileEncoding):
    """The tokenizer and chat template of a model's folder, for conversations with media of `kinds`.
    The rows of the model's embedding tell a foreign tokenizer; `resolved` is what `transformers`
    made of the folder in another process. ValueError: see `resolve_tokenizer`; no jinja template.
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
        named, self.template = self.resolved.named, self.resolved.template
        backend = self.resolved.backend.encode()
        super().__init__(parse_tokenizer(backend))
        if embedding_size is not None:
            check_embedding(self.vocab_size, embedding_size, str(self.folder))
        written, framed = picture_frame(named, self.template)
        self._template = ChatTemplate(self.template, named, str(self.folder), written, framed)
        self._has_warned = False
        self._tokens = {kind: self._placeholder(kind, named) for kind in self._kinds}
        ids = {name: self.ids_of(token) for name, token in named.items()}
        # ids that begin and end a picture, where the configuration names such (InternVL)
        begin_ids, end_ids = ids.get("start_image_token", ()), ids.get("end_image_token", ())
        self.picture_ends = (begin_ids, end_ids) if begin_ids else None
        # those of a frame of a clip (Gemma 4)
        self.frame_ends = ids.get("boi_token", ()), ids.get("eoi_token", ())
        (self.pad_id,) = ids.get("pad_token") or ids.get("eos_token") or (0,)
        self.placeholder_id = self.pad_id  # stands where media are; none is embedded
        (self.im_end_id,) = ids.get("eos_token") or (-1,)
        self.digest = hashlib.blake2b(backend + self.template.encode(), digest_size=8).hexdigest()
        self._collect_special()

    def _placeholder(self, kind: str, named: Mapping[str, str]) -> str | None:
        configured = named.get(f"context_{kind}_token") or named.get(f"{kind}_token")
        candidates = (configured,) if configured else self._kinds[kind].placeholders
        return next((t for t in candidates if self.ids_of(t)), None)

    def _collect_special(self) -> None:
        """Patterns of the special tokens: as encoding finds them, and as text spells them."""
        placeholders = {t for t in self._tokens.values() if t}
        self._placeholders = re.compile("|".join(map(re.escape, placeholders)) or NOTHING)
        special = [
            (i, token)
            for i, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.content and (token.special or token.content in placeholders)
        ]
        special.sort(key=lambda item: -len(item[1].content))  # the longest that matches
        self._special_ids = [i for i, _ in special]
        patterns = [
            r"\s*" * t.lstrip + f"({re.escape(t.content)})" + r"\s*" * t.rstrip for _, t in special
        ]
        self._special = re.compile("|".join(patterns) or NOTHING)
        spelled = [re.escape(t.content) for _, t in special]
        self._spelled = re.compile("|".join([*spelled, LOOKS_SPECIAL.pattern]))

    def media_id(self, kind: str) -> int:
        """Id of the token that stands for a kind of media; ValueError if there is none."""
        token = self._tokens[kind]
        if token is None:
            raise ValueError(
                f"{self.folder}: no token stands for {kind} "
                f"({', '.join(self._kinds[kind].placeholders)}); "
                f"add {kind}_token to tokenizer_config.json, or leave out such samples"
            )
        return self.ids_of(token)[0]

    def ids_of(self, token: str) -> tuple[int, ...]:
        """The id of a special token; () if there is none of that name."""
        number = self._tokenizer.token_to_id(token)
        return () if number is None else (number,)

    def encode_turns(
        self, turns: Sequence[tuple[str, str]], fields: TemplateFields = NO_FIELDS
    ) -> tuple[TokenRun, ...]:
        """Pieces of LLaVA-format turns (human, gpt, system, tool) with what else the record gives
        the template; the k-th tag of all becomes medium k, wherever the template puts it.
        ValueError when the template leaves out a medium."""
        kinds = [kind for _, text in turns for kind in self._tag.findall(text)]
        return self._split(kinds, *self.encode_chat(*self.messages(turns, fields)))

    def encode_question(self, question: str) -> tuple[TokenRun, ...]:
        """Pieces of a user's turn, up to where the template has the answer begin."""
        messages, _ = self.messages([("human", question)], NO_FIELDS)
        text, _ = self._template.render(messages, {}, add_generation_prompt=True)
        ids, _ = self._encode_rendered(text)
        return self._split(self._tag.findall(question), ids, np.zeros(len(ids), int))

    def rendered(self, messages: Sequence[Message], variables: Message) -> str:
        """The template's text, as it stands before pictures are framed."""
        return self._template.render(messages, variables, frames_pictures=False)[0]

    def reads_variable(self, name: str) -> bool:
        """Whether the template asks for a field of messages, or a variable, of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    def messages(
        self, turns: Sequence[tuple[str, str]], fields: TemplateFields
    ) -> tuple[list[Message], Message]:
        """The turns as templates take them, and the variables."""
        further = fields.messages or ({},) * len(turns)
        messages: list[Message] = [
            {**self._escape_special(f), **self._message(*t)} for t, f in zip(turns, further)
        ]
        return messages, self._escape_special(fields.variables)

    def _escape_special(self, value: Any) -> Any:
        """A value of a record whose texts spell no special token."""
        if isinstance(value, str):
            return self._spelled.sub(lambda m: m[0][0] + BREAK + m[0][1:], value)
        if isinstance(value, Mapping):
            return {name: self._escape_special(v) for name, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape_special(v) for v in value]
        return value

    def _message(self, role: str, text: str) -> Message:
        if MARKS.search(text):
            raise ValueError("text holds U+FDD0 or U+FDD1, which are no characters")
        content_parts: list[dict[str, str]] = []
        for k, text_or_kind in enumerate(self._tag.split(text)):
            if k % 2:
                if self.picture_ends and (preface := self._kinds[text_or_kind].preface):
                    content_parts.append({"type": "text", "text": preface})
                content_parts.append({"type": text_or_kind})
            elif text_or_kind:
                content_parts.append({"type": "text", "text": self._escape_special(text_or_kind)})
        has_media = any(p["type"] != "text" for p in content_parts)
        if self._template.takes_parts and (has_media or not self._template.takes_texts):
            return {"role": ROLES[role], "content": content_parts}
        texts = [p.get("text") or self._tokens[p["type"]] or "" for p in content_parts]
        return {"role": ROLES[role], "content": "".join(texts)}

    def encode_chat(
        self, messages: Sequence[Message], variables: Message = NO_FIELDS.variables
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [t], the answer that each is of, int [t]) of messages as templates take them
        ("role" and "content", which may be a list of parts). Media are one placeholder token each.
        Answers count from 1, 0 is no answer; -1 where the template does not tell them apart."""
        text, spans = self._template.render(messages, variables)
        ids, characters = self._encode_rendered(text)
        self._check_texts(messages, text)
        if spans:
            n_answers = sum(message["role"] == "assistant" for message in messages)
            are_told_apart = len(spans) == n_answers
            # The special token behind the last answer ends each that it follows at once.
            last = self._special.match(text, spans[-1][1])
            token = last[last.lastindex or 0] if last else ""
            ended = [(b, e + len(token) * text.startswith(token, e)) for b, e in spans]
            numbered = [(k if are_told_apart else -1, span) for k, span in enumerate(ended, 1)]
        else:
            numbered = self._answer_spans(messages, variables, text)
        begins, ends = characters.T
        answers = np.zeros(len(ids), int)
        for number, (begin, end) in numbered:
            inside = np.flatnonzero((ends > begin) & (begins < end))
            if len(inside):
                answers[inside[0] : inside[-1] + 1] = number
        return ids, answers

    def _encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [t] and the characters each stands for, int [t, 2]."""
        ids: list[int] = []
        characters: list[Span] = []
        start = 0
        for match in [*self._special.finditer(text), None]:
            segment = text[start : match.start() if match else len(text)]
            if unknown := LOOKS_SPECIAL.search(segment):
                raise ValueError(
                    f"{self.folder}: chat template writes {unknown[0]}, which tokenizer.json "
                    "lacks; take both files from one model"
                )
            encoding = self.encoding(segment.replace(BREAK, ""))
            # of the characters that stay
            index = [k for k, character in enumerate(segment, start) if character != BREAK]
            ids += encoding.ids
            characters += [
                (index[b], index[e - 1] + 1) if e > b else (0, 0) for b, e in encoding.offsets
            ]
            if match and match.lastindex:
                ids.append(self._special_ids[match.lastindex - 1])
                characters.append(match.span(match.lastindex))
                start = match.end()
        return np.array(ids, np.int32), np.array(characters, np.int64).reshape(-1, 2)

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

    def _answer_spans(
        self, messages: Sequence[Message], variables: Message, text: str
    ) -> list[tuple[int, Span]]:
        """The answers, each with its number: the difference that each makes to the text, up to its
        end-of-turn token. One that loses its thoughts once another question follows is left out.
        """
        spans = []
        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        for number, k in enumerate(answers, 1):
            through, _ = self._template.render(messages[: k + 1], variables)
            begin = self._answer_start(messages[:k], variables, through)
            is_appended = text.startswith(through)
            if is_appended and begin is not None:
                marks = list(self._special.finditer(through, begin))
                spans.append((number, (begin, marks[-1].end() if marks else len(through))))
            elif begin is None or k == answers[-1]:
                raise ValueError(
                    f"{self.folder}: chat template does not only append; mark its answers with "
                    "{% generation %} ... {% endgeneration %}"
                )
            elif not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s: the chat template shows answers otherwise once another question follows "
                    "(it drops their thinking): of such a chat only the last answer is trained on; "
                    "mark answers with {%% generation %%} ... {%% endgeneration %%} to train on "
                    "all", self.folder,
                )  # fmt: skip
        return spans

    def _answer_start(
        self, messages: Sequence[Message], variables: Message, through: str
    ) -> int | None:
        """Where the answer to `messages` begins in the text up to its end: behind what the prompt
        for an answer shares with that text, as a prompt may hold a thought that answers lack. None:
        the prompt shares nothing of its own."""
        prompt, _ = self._template.render(messages, variables, add_generation_prompt=True)
        if through.startswith(prompt):
            return len(prompt)
        pairs = zip(prompt, through)
        n_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return n_shared if n_shared > len(self._template.render(messages, variables)[0]) else None

    def _split(
        self, kinds: Sequence[str], ids: np.ndarray, answers: np.ndarray
    ) -> tuple[TokenRun, ...]:
        """Pieces of a rendered conversation with media of these kinds."""
        media_by_token: dict[int, list[int]] = {}
        for k, kind in enumerate(kinds):
            media_by_token.setdefault(self.media_id(kind), []).append(k)
        runs: list[TokenRun] = []
        cuts = {*(np.flatnonzero(np.diff(answers)) + 1).tolist()}
        for position in np.flatnonzero(np.isin(ids, [*media_by_token])).tolist():
            cuts |= {position, position + 1}
        bounds = sorted({0, len(ids)} | cuts)
        for start, stop in pairwise(bounds):
            media = media_by_token.get(int(ids[start]))
            if media is None:
                run, answer = tuple(ids[start:stop].tolist()), int(answers[start])
                runs.append(TokenRun(run, answer != 0, answer=max(-1, answer - 1)))
                continue
            if not media:
                raise ValueError(f"{self.folder}: chat template repeats a medium")
            medium_run = TokenRun(medium=media.pop(0))
            if self.picture_ends and self._kinds[kinds[medium_run.medium]].wrapped:
                begin_ids, end_ids = self.picture_ends
                runs += [TokenRun(begin_ids), medium_run, TokenRun(end_ids)]
            else:
                runs.append(medium_run)
        if any(media_by_token.values()):
            raise ValueError(
                f"{self.folder}: chat template leaves out media; use the chat_template.jinja "
                "of the multimodal model"
            )
        return tuple(runs)


AnyTokenizer = Tokenizer | ChatTokenizer
