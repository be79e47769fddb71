"""What a model is asked to evaluate it: from records, or from samples that a source gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.contract import MultimodalModel
from dflop_jax.data import MediaSpec, Sample, Source, Tokenizer
from dflop_jax.data.build import question_readers
from dflop_jax.data.datasets.llava_records import Record
from dflop_jax.data.datasets.located import Located, RecordReader
from dflop_jax.data.sample import Places
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.generate.prompt import Talk, talk_sample
from dflop_jax.generate.published import end_ids
from dflop_jax.generate.row import LLM
from dflop_jax.records import Load

AnyTokenizer = Tokenizer | ChatTokenizer


@dataclass(frozen=True)
class PreparedQuestion:
    """A question, prepared for the model.

    Attributes:
      text: as it is shown.
      references: answers that are right; letters of the `choices` where there are any.
      sample: up to where the answer begins.
    """

    text: str
    references: tuple[str, ...]
    choices: tuple[str, ...]
    sample: Sample


@dataclass(frozen=True)
class PendingQuestion:
    """A question that can be made when it is its turn; ValueError: it cannot."""

    name: str
    make: Callable[[], PreparedQuestion]


def of_records(
    data: DataConfig, model: MultimodalModel, tokenizer: AnyTokenizer, n: int
) -> list[PendingQuestion]:
    """Questions of `n` records of `data.path`, drawn by `data.seed`; all for 0.

    Raises:
      ValueError: data that cannot be read.
    """
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    all_of_them: list[tuple[RecordReader, Located]] = []
    for reader in question_readers(data, spec).values():
        all_of_them += [(reader, located) for located in reader.locate()]
    make = partial(_of_record, data, model, tokenizer)
    return [
        PendingQuestion(located.place, partial(make, partial(reader.read, located)))
        for reader, located in (all_of_them[k] for k in _drawn(len(all_of_them), n, data.seed))
    ]


def of_source(source: Source, tokenizer: AnyTokenizer, n: int, seed: int) -> list[PendingQuestion]:
    """Questions of `n` samples of a source, whose last supervised text is the reference."""
    return _of_samples(source, tokenizer, _drawn(len(source), n, seed))


def of_held_out(
    source: Source,
    data: DataConfig,
    model: MultimodalModel,
    tokenizer: AnyTokenizer,
    chosen: Sequence[int],
) -> list[PendingQuestion]:
    """Questions of some samples of a run's own source: of their records where it has them, as
    `of_records`, else as `of_source`."""
    record: Callable[[int], Record] | None = getattr(source, "record", None)
    if record is None:
        return _of_samples(source, tokenizer, chosen)
    make = partial(_of_record, data, model, tokenizer)
    return [PendingQuestion(source.label(i), partial(make, partial(record, i))) for i in chosen]


def _of_samples(
    source: Source, tokenizer: AnyTokenizer, chosen: Sequence[int]
) -> list[PendingQuestion]:
    make = partial(_of_sample, source, tokenizer, end_ids(tokenizer, None))
    return [PendingQuestion(source.label(i), partial(make, i)) for i in chosen]


def _drawn(of: int, n: int, seed: int) -> list[int]:
    if not n or n >= of:
        return list(range(of))
    return sorted(np.random.default_rng([seed, 5]).permutation(of)[:n].tolist())


def _of_record(
    data: DataConfig,
    model: MultimodalModel,
    tokenizer: AnyTokenizer,
    read: Callable[[], Record],
) -> PreparedQuestion:
    record = read()
    turns, references = record.turns, record.answers
    if turns[-1][0] == "gpt":
        references = references or (turns[-1][1],)
        turns = turns[:-1]
    try:
        sample = talk_sample(Talk(turns, record.media, record.fields), data, model, tokenizer)
    except ValueError as e:
        raise ValueError(f"{record.name}: {e}") from None
    return PreparedQuestion(turns[-1][1], references, record.choices, sample)


def _of_sample(
    source: Source, tokenizer: AnyTokenizer, ends: frozenset[int], index: int
) -> PreparedQuestion:
    sample = source.sample(index)
    llm = sample.fields[LLM]
    # Token t is answered by what follows it.
    supervised = np.flatnonzero(llm["weights"])
    if not len(supervised):
        raise ValueError(f"{source.label(index)}: no text of it is supervised; leave it out")
    first = int(supervised[np.flatnonzero(np.diff(supervised, prepend=-2) > 1)[-1]])
    answer = [int(t) for t in llm["targets"][first : supervised[-1] + 1]]
    answer = [t for t in answer if t not in ends]
    said = [int(t) for t, seen in zip(llm["tokens"], llm["is_visual"], strict=True) if not seen]
    question = tokenizer.decode(said[: first + 1 - int(llm["is_visual"][: first + 1].sum())])
    return PreparedQuestion(
        question, (tokenizer.decode(answer).strip(),), (), up_to(sample, first + 1)
    )


def up_to(sample: Sample, tokens: int) -> Sample:
    """The first tokens of a sample, whose media all stand among them."""
    fields = {**sample.fields, LLM: {k: a[:tokens] for k, a in sample.fields[LLM].items()}}
    places = {}
    for (source, target), p in sample.places.items():
        assert target == LLM, (source, target)
        assert not (p.index[tokens:] >= 0).any(), source
        places[source, target] = Places(
            p.index[:tokens], None if p.weight is None else p.weight[:tokens]
        )
    load = Load({**sample.load.pieces, LLM: (tokens,)})
    return replace(sample, fields=fields, places=places, load=load)
