"""Answers to the held-out samples of a run while it trains, and how good they are."""

from __future__ import annotations

from pathlib import Path

import jax

from dflop_jax.config import Config
from dflop_jax.data import MediaSpec, Source
from dflop_jax.data.build import any_tokenizer
from dflop_jax.evaluate.metrics import check_metrics
from dflop_jax.evaluate.questions import PendingQuestion, of_held_out
from dflop_jax.evaluate.run import compile_programs, evaluate
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.replica import least_ways
from dflop_jax.generate.room import device_bytes
from dflop_jax.generate.sampling import Sampling
from dflop_jax.train.evaluate import held_out_samples
from dflop_jax.train.prepare import Workplace

ROWS = 16  # answers of a replica at once, as of `dflop evaluate`


def held_out_answers(config: Config, place: Workplace, source: Source) -> HeldOutAnswers:
    """What answers the held-out samples of a run; `train.trainer.Trainer` takes it as `answers`.

    Raises:
      ValueError: `train.eval_metrics` names no metric, or the model does not generate.
    """
    return HeldOutAnswers(config, place, source)


def answer_bytes(place: Workplace) -> float:
    """Bytes of a device that answers in training need beside a run's state, split over all of its
    devices: they use as few as have room."""
    config = place.config
    if not hasattr(place.model.modules.get("llm"), "logits"):
        return 0.0  # which is refused where it should answer
    tokens = config.data.max_tokens + config.train.eval_max_tokens
    return device_bytes(place.model, ROWS, tokens, place.n_devices)


class HeldOutAnswers:
    """Greedy answers to the held-out samples whose loss is evaluated, by the parameters of a
    checkpoint, or their average where the run keeps one; on all processes together."""

    def __init__(self, config: Config, place: Workplace, source: Source) -> None:
        train = config.train
        check_metrics(train.answer_metrics)
        if not hasattr(place.model.modules.get("llm"), "logits"):
            raise ValueError(
                f"train.eval_generate_every={train.eval_generate_every}: {config.model.factory} "
                "does not answer in text; leave it out"
            )
        self._config, self._place = config, place
        self._how = Sampling(train.eval_max_tokens)
        kinds = MediaSpec.of(place.model.preprocessing, place.model.piece_tokens).kinds
        tokenizer = any_tokenizer(config.data.tokenizer, place.model.vocab_size, kinds)
        n = min(train.eval_samples or len(source), len(source))
        chosen = held_out_samples(source, n, config.data.seed)
        indices = sorted(i for which in chosen.values() for i in which)
        self._asked: list[PendingQuestion] = of_held_out(
            source, config.data, place.model, tokenizer, indices
        )
        self._generator: Generator | None = None

    @property
    def device_bytes(self) -> float:
        """See `train.answers.Answers`."""
        return answer_bytes(self._place)

    def prepare(self) -> None:
        """Compile all programs, while the run's state is in place: the parameters are split over as
        many devices as have room beside it."""
        peers = self._place.peers
        used = max((_used_bytes(d) for d in jax.local_devices()), default=0)
        ways = least_ways(self._place.model, self._place.devices, used)
        told = peers.gather("answers/ways", str(ways).encode())
        ways = int(peers.share("answers/ways", str(max(map(int, told or [b"0"]))).encode()))
        self._generator = Generator(self._config, None, self._place.devices, rows=ROWS, ways=ways)
        compile_programs(self._generator, self._asked, self._how)
        self._generator.free()

    def metrics(self, step: int, checkpoint: Path) -> dict[str, float]:
        """By the name of each metric that some sample has references for, what the answers after
        `step` steps come to.

        Raises:
          ValueError: none can be asked, or the checkpoint is damaged.
        """
        assert self._generator is not None, "call prepare first"
        self._generator.load(checkpoint, average=bool(self._config.train.ema))
        try:
            names, key = self._config.train.answer_metrics, f"answers/{step}"
            found = evaluate(self._generator, self._asked, self._how, names, self._place.peers, key)
        finally:
            self._generator.free()
        return {name: value for name, value in found.metrics.items() if value is not None}


def _used_bytes(device: jax.Device) -> int:
    return (device.memory_stats() or {}).get("bytes_in_use", 0)
