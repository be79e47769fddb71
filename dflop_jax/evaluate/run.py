"""Questions answered over the devices and processes of a run, and how good the answers are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from dflop_jax.cluster.peers import Peers
from dflop_jax.evaluate.metrics import ScoredAnswer, mean_of, scores
from dflop_jax.evaluate.questions import PendingQuestion, PreparedQuestion
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.row import LLM
from dflop_jax.generate.sampling import Sampling

BATCHES_AHEAD = 8  # prepared together, and put together by length: more pad less and hold more


@dataclass(frozen=True)
class AnswerRow:
    """One question and what was said.

    Attributes:
      scores: by metric, of those that have references.
      trouble: why it could not be asked; it then counts in no metric.
    """

    name: str
    question: str
    references: tuple[str, ...]
    choices: tuple[str, ...]
    answer: str
    stopped: str
    tokens: int
    scores: dict[str, float]
    trouble: str = ""


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation came to.

    Attributes:
      samples: questions that were answered.
      metrics: by name; None where no question has references.
      answers: of all questions, in their order, also of those that could not be asked.
    """

    samples: int
    metrics: dict[str, float | None]
    answers: tuple[AnswerRow, ...]


def evaluate(
    generator: Generator,
    asked: Sequence[PendingQuestion],
    how: Sampling,
    metrics: Sequence[str],
    peers: Peers,
    key: str = "evaluate",
) -> Evaluated:
    """Answer all questions, on all processes together, each of which gets what it came to.

    Args:
      key: of the messages between the processes, of this evaluation only.

    Raises:
      ValueError: there are no questions, or none can be asked.
    """
    if not asked:
        raise ValueError("there is nothing to evaluate: no records; name data with some")
    rows = dict(_answered(generator, asked, how))
    mine = rows if generator.replica.leads else {}
    gathered = peers.gather(key, msgspec.json.encode(mine))
    known = [msgspec.json.decode(part, type=dict[int, AnswerRow]) for part in gathered]
    whole = {k: row for part in known for k, row in part.items()}
    text = msgspec.json.encode([whole[k] for k in sorted(whole)])
    answers = msgspec.json.decode(peers.share(f"{key}/all", text), type=tuple[AnswerRow, ...])
    return _scored(answers, metrics)


def _scored(rows: Sequence[AnswerRow], metrics: Sequence[str]) -> Evaluated:
    asked = [row for row in rows if not row.trouble]
    if not asked:
        raise ValueError(
            f"none of {len(rows)} questions can be asked: {rows[0].trouble}; name fields "
            "that have other names (--data.columns), or look with dflop check --data"
        )
    answered = [ScoredAnswer(row.answer, row.references, row.choices) for row in asked]
    by_metric = {name: scores(name, answered) for name in metrics}
    of_row: list[dict[str, float]] = [
        {name: score for name, score in zip(metrics, column, strict=True) if score is not None}
        for column in zip(*by_metric.values(), strict=True)
    ]
    numbered = iter(of_row or [{}] * len(asked))
    done = [row if row.trouble else replace(row, scores=next(numbered)) for row in rows]
    return Evaluated(len(asked), {m: mean_of(m, answered) for m in metrics}, tuple(done))


def compile_programs(generator: Generator, asked: Sequence[PendingQuestion], how: Sampling) -> None:
    """Compile all that the same questions need later, answered with any parameters."""
    for batch in _batches(generator, asked):
        if not isinstance(batch, tuple):
            generator.begin_answers([q.sample for q in batch.values()], how)


def _answered(
    generator: Generator, asked: Sequence[PendingQuestion], how: Sampling
) -> Iterator[tuple[int, AnswerRow]]:
    """Yield the rows of this replica's questions, as they are answered."""
    for batch in _batches(generator, asked):
        if isinstance(batch, tuple):
            k, why = batch
            yield k, AnswerRow(asked[k].name, "", (), (), "", "", 0, {}, why)
            continue
        samples = [q.sample for q in batch.values()]
        answers = generator.answers(samples, how, [*batch])
        for (k, q), said in zip(batch.items(), answers, strict=True):
            text, n_tokens = said.text.strip(), len(said.tokens)
            yield (
                k,
                AnswerRow(
                    asked[k].name, q.text, q.references, q.choices, text, said.stopped, n_tokens, {}
                ),
            )


def _batches(
    generator: Generator, asked: Sequence[PendingQuestion]
) -> Iterator[dict[int, PreparedQuestion] | tuple[int, str]]:
    """Yield this replica's questions by number, as many as are answered together; and of those that
    cannot be asked (number, why)."""
    replica = generator.replica
    # Every replica its own, dealt in turn; who runs one together with others answers alike.
    own = range(replica.number, len(asked), replica.count)
    rows = generator.rows * replica.ranks
    size = BATCHES_AHEAD * rows
    parts = [own[k : k + size] for k in range(0, len(own), size)]
    with ThreadPoolExecutor(generator.config.data.workers) as pool:
        # The next ones are decoded while these are answered.
        coming = [pool.submit(_made, asked[k]) for k in parts[0]] if parts else []
        for n, part in enumerate(parts):
            made = dict(zip(part, (c.result() for c in coming), strict=True))
            following = parts[n + 1] if n + 1 < len(parts) else ()
            coming = [pool.submit(_made, asked[k]) for k in following]
            questions = {k: q for k, q in made.items() if isinstance(q, PreparedQuestion)}
            yield from ((k, why) for k, why in made.items() if isinstance(why, str))
            order = sorted(questions, key=lambda k: (questions[k].sample.load.tokens(LLM), k))
            for first in range(0, len(order), rows):
                yield {k: questions[k] for k in order[first : first + rows]}


def _made(asked: PendingQuestion) -> PreparedQuestion | str:
    """The question, or why there is none."""
    try:
        return asked.make()
    except ValueError as e:
        return " ".join(str(e).split())
