"""Tokenizes conversations with a model folder's tokenizer.json, its configuration and chat
template. Tokens equal those of `transformers`' `apply_chat_template`; only answers are supervised.

A special token that a record's text spells is plain text and cannot begin or end a turn.
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
    `embedding_size`: rows of the model's embedding, to detect a wrong tokenizer; `resolved`: the
    files as resolved in another process. ValueError: see `resolve_tokenizer`; no jinja template.
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
        # ids that begin and end a picture, if the configuration names them (InternVL)
        begin_ids, end_ids = ids.get("start_image_token", ()), ids.get("end_image_token", ())
        self.picture_ends = (begin_ids, end_ids) if begin_ids else None
        # ids that begin and end a frame of a clip (Gemma 4)
        self.frame_ends = ids.get("boi_token", ()), ids.get("eoi_token", ())
        (self.pad_id,) = ids.get("pad_token") or ids.get("eos_token") or (0,)
        self.placeholder_id = self.pad_id  # id of media tokens, which are not embedded
        (self.im_end_id,) = ids.get("eos_token") or (-1,)
        self.digest = hashlib.blake2b(backend + self.template.encode(), digest_size=8).hexdigest()
        self._collect_special()

    def _placeholder(self, kind: str, named: Mapping[str, str]) -> str | None:
        configured = named.get(f"context_{kind}_token") or named.get(f"{kind}_token")
        candidates = (configured,) if configured else self._kinds[kind].placeholders
        return next((t for t in candidates if self.ids_of(t)), None)

    def _collect_special(self) -> None:
        """Set the patterns of special tokens in rendered text, and in the text of records."""
        placeholders = {t for t in self._tokens.values() if t}
        self._placeholders = re.compile("|".join(map(re.escape, placeholders)) or NOTHING)
        special = [
            (i, token)
            for i, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.content and (token.special or token.content in placeholders)
        ]
        special.sort(key=lambda item: -len(item[1].content))  # the longest match first
        self._special_ids = [i for i, _ in special]
        patterns = [
            r"\s*" * t.lstrip + f"({re.escape(t.content)})" + r"\s*" * t.rstrip for _, t in special
        ]
        self._special = re.compile("|".join(patterns) or NOTHING)
        spelled = [re.escape(t.content) for _, t in special]
        self._spelled = re.compile("|".join([*spelled, LOOKS_SPECIAL.pattern]))

    def media_id(self, kind: str) -> int:
        """Return the id of the token for a kind of media. ValueError: there is none."""
        token = self._tokens[kind]
        if token is None:
            raise ValueError(
                f"{self.folder}: no token stands for {kind} "
                f"({', '.join(self._kinds[kind].placeholders)}); "
                f"add {kind}_token to tokenizer_config.json, or leave out such samples"
            )
        return self.ids_of(token)[0]

    def ids_of(self, token: str) -> tuple[int, ...]:
        """Return (id,) of a special token, or () if there is none of that name."""
        number = self._tokenizer.token_to_id(token)
        return () if number is None else (number,)

    def encode_turns(
        self, turns: Sequence[tuple[str, str]], fields: TemplateFields = NO_FIELDS
    ) -> tuple[TokenRun, ...]:
        """Return the token runs of LLaVA-format turns (human, gpt, system, tool). `fields`: other
        inputs of the template. The k-th tag becomes medium k, wherever the template puts it.
        ValueError: the template leaves out a medium."""
        kinds = [kind for _, text in turns for kind in self._tag.findall(text)]
        return self._split(kinds, *self.encode_chat(*self.messages(turns, fields)))

    def encode_question(self, question: str) -> tuple[TokenRun, ...]:
        """Return the token runs of a user's turn, up to the beginning of the answer."""
        messages, _ = self.messages([("human", question)], NO_FIELDS)
        text, _ = self._template.render(messages, {}, add_generation_prompt=True)
        ids, _ = self._encode_rendered(text)
        return self._split(self._tag.findall(question), ids, np.zeros(len(ids), int))

    def render_text(self, messages: Sequence[Message], variables: Message) -> str:
        """Return the template's text, without the tokens that processors put around pictures."""
        return self._template.render(messages, variables, frames_pictures=False)[0]

    def reads_variable(self, name: str) -> bool:
        """Return whether the template reads a message field or a variable of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    def messages(
        self, turns: Sequence[tuple[str, str]], fields: TemplateFields
    ) -> tuple[list[Message], Message]:
        """Return the messages and the variables for the template."""
        further = fields.messages or ({},) * len(turns)
        messages: list[Message] = [
            {**self._escape_special(f), **self._message(*t)} for t, f in zip(turns, further)
        ]
        return messages, self._escape_special(fields.variables)

    def _escape_special(self, value: Any) -> Any:
        """Return a record's value with the special tokens in all its texts escaped."""
        if isinstance(value, str):
            return self._spelled.sub(lambda m: m[0][0] + BREAK + m[0][1:], value)
        if isinstance(value, Mapping):
            return {name: self._escape_special(v) for name, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape_special(v) for v in value]
        return value

    def _message(self, role: str, text: str) -> Message:
        if MARKS.search(text):
            raise ValueError("text contains U+FDD0 or U+FDD1, which are not characters")
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
        """Return (ids int32 [t], number of each id's answer int [t]) of messages ("role" and
        "content", which may be a list of parts). Each medium is one placeholder token. Answers
        count from 1; 0: no answer; -1: the number of the answer is unknown."""
        text, spans = self._template.render(messages, variables)
        ids, characters = self._encode_rendered(text)
        self._check_texts(messages, text)
        if spans:
            n_answers = sum(message["role"] == "assistant" for message in messages)
            are_told_apart = len(spans) == n_answers
            # An answer includes the special token of the last answer's end if it follows directly.
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
        """Return ids int32 [t] and the range of characters of each, int [t, 2]."""
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
            # positions of the characters other than BREAK
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
        """Raise ValueError if the template leaves out the text of a message. Templates of reasoning
        models may leave out thoughts."""
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
        """Return (number, span) of each answer: the text that it adds, up to its end-of-turn token.
        An answer whose thoughts are dropped once another question follows is left out.
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
                    f"{self.folder}: chat template changes earlier text; mark its answers with "
                    "{% generation %} ... {% endgeneration %}"
                )
            elif not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s: the chat template changes answers once another question follows (it drops "
                    "their thinking), so only the last answer of such a chat is trained on; mark "
                    "answers with {%% generation %%} ... {%% endgeneration %%} to train on all",
                    self.folder,
                )
        return spans

    def _answer_start(
        self, messages: Sequence[Message], variables: Message, through: str
    ) -> int | None:
        """Return where the answer to `messages` begins in `through`, the text up to its end: after
        the prefix that it shares with the prompt (which may have a thought that the answer lacks).
        None: the shared prefix is no longer than the messages."""
        prompt, _ = self._template.render(messages, variables, add_generation_prompt=True)
        if through.startswith(prompt):
            return len(prompt)
        pairs = zip(prompt, through)
        n_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return n_shared if n_shared > len(self._template.render(messages, variables)[0]) else None

    def _split(
        self, kinds: Sequence[str], ids: np.ndarray, answers: np.ndarray
    ) -> tuple[TokenRun, ...]:
        """Return the token runs of a rendered conversation with media of these kinds."""
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
