"""Held-out loss by dataset: which samples, and sums that a count by hand gives."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax import Config, DataConfig, ModelConfig, TrainConfig
from dflop_jax.data import MediaSpec, make_source
from dflop_jax.data.packing import LocalRanks
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.records import Prices
from dflop_jax.report.wall_time import TimeLog
from dflop_jax.train import evaluate
from dflop_jax.train.callbacks import Callbacks
from dflop_jax.train.evaluate import HeldOutEvaluator, draw_held_out_samples
from dflop_jax.train.feed import Packer
from dflop_jax.train.run_context import build_model
from tests.distributed.service import make_job
from tests.plans import NANO, programs

MODEL = build_model(ModelConfig(size="nano"))
NEEDED = dict.fromkeys(NANO.layout.modules, lambda length, content: float(length))
NAMES = ("a/long.json", "b/long.json", "short.json")


@pytest.fixture
def mixture(tmp_path):
    """60, 15 and 2 conversations of different lengths; the configuration."""
    for name, n, words in zip(NAMES, (60, 15, 2), (3, 9, 5), strict=True):
        turns = [{"from": "human", "value": "Say."}, {"from": "gpt", "value": "word " * words}]
        rows = [{"id": f"{name}{k}", "conversations": turns} for k in range(n)]
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(rows))
    text = "".join(f"- {name}\n" for name in NAMES)
    (tmp_path / "mix.yaml").write_text(text)
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(path=str(tmp_path / "mix.yaml"), workers=1),
        train=TrainConfig(global_batch=8, eval_samples=20),
        cache_dir=str(tmp_path),
    )


def opened(config):
    spec = MediaSpec.of(MODEL.preprocessing, MODEL.piece_tokens)
    options = {"vocab_size": MODEL.vocab_size, "index_dir": config.cache_dir}
    return make_source(config.data, spec, in_processes=False, **options)


class Counted:
    """An executor whose sums of a batch a count by hand gives, too."""

    model, trainable = MODEL, frozenset({"llm"})

    averaged = staticmethod(nullcontext)

    def run_evaluation(self, schedule, groups):
        sums = {"llm.loss_sum": 0.0, "llm.correct": 0.0}
        for group, arrays in zip(schedule.groups, groups, strict=True):
            if group.module == "llm":
                weights, tokens = arrays.fields["weights"], arrays.fields["tokens"]
                sums["llm.loss_sum"] += float((weights * np.sqrt(1.0 + tokens)).sum())
                sums["llm.correct"] += float((weights * (tokens % 3 == 0)).sum())
        return SimpleNamespace(local_result=lambda: SimpleNamespace(sums=sums))


def held_out_of(config, source, packer) -> HeldOutEvaluator:
    place = SimpleNamespace(config=config, peers=packer.peers, time_log=TimeLog())
    progress = SimpleNamespace(log=lambda line: None)
    ready = SimpleNamespace(context=place, held_out=source, ex=Counted(), folder=None,
                            prices=Prices(programs(NANO)), progress=progress,
                            callbacks=Callbacks())  # fmt: skip
    return HeldOutEvaluator(ready, packer)


def by_hand(samples):
    fields = [s.fields["llm"] for s in samples]
    weights, tokens = (np.concatenate([f[n] for f in fields]) for n in ("weights", "tokens"))
    loss = (weights * np.sqrt(1.0 + tokens)).sum() / weights.sum()
    return loss, (weights * (tokens % 3 == 0)).sum() / weights.sum()


def test_every_dataset_has_a_loss_of_its_own(mixture):
    source = opened(mixture)
    packer = Packer(NANO, MODEL, LocalRanks.single_process(NANO.layout), ProcessGroup(), NEEDED)
    held_out = held_out_of(mixture, source, packer)
    row = held_out.evaluate(5)
    chosen = draw_held_out_samples(source, 20, mixture.data.seed)
    assert {name: len(which) for name, which in chosen.items()} == dict(zip(NAMES, (16, 3, 1)))
    samples = {name: [source.sample(i) for i in which] for name, which in chosen.items()}
    assert list(row.by_source) == list(NAMES)
    for name, own in row.by_source.items():
        assert (own.loss, own.accuracy) == pytest.approx(by_hand(samples[name]), rel=1e-5)
        assert source.label(chosen[name][0]).startswith(mixture.cache_dir)
    whole = by_hand([s for group in samples.values() for s in group])
    assert (row.step, row.loss, row.accuracy) == (5, *map(pytest.approx, whole))
    assert len({own.loss for own in row.by_source.values()}) == 3


def test_samples_without_a_supervised_token_have_no_loss():
    sums = {"llm.loss_sum": 0.0, "llm.correct": 0.0}
    none = evaluate._make_held_out_loss(MODEL, sums, {"llm": 0.0})
    assert (str(none.loss), none.accuracy) == ("nan", None)
    assert (
        evaluate._make_held_out_loss(MODEL, {**sums, "llm.loss_sum": 3.0}, {"llm": 0.5}).loss == 6.0
    )


def test_processes_drop_and_pack_the_same_batches(mixture):
    """Neither waits for what the other does not pack."""
    source, job = opened(mixture), make_job(2)

    def process(peers):
        packer = Packer(NANO, MODEL, LocalRanks.single_process(NANO.layout), peers, NEEDED)
        held_out = held_out_of(mixture, source, packer)
        return [held_out.evaluate(step) for step in (1, 2)]

    with ThreadPoolExecutor(2) as pool:
        first, second = [f.result(120) for f in [pool.submit(process, g) for g in job.groups]]
    job.stop()
    assert first == second
    assert replace(first[0], step=2) == first[1]


class Named:
    """A mixture of datasets of so many samples."""

    def __init__(self, sizes):
        self.names = [name for name, n in sizes.items() for _ in range(n)]

    def __len__(self):
        return len(self.names)

    def dataset_of(self, index):
        return self.names[index]


@pytest.mark.parametrize(
    "sizes, n, counts",
    [
        ({"a": 10}, 4, {"": 4}),
        ({"a": 6, "b": 6}, 4, {"a": 2, "b": 2}),
        ({"a": 100, "b": 1, "c": 1}, 10, {"a": 8, "b": 1, "c": 1}),
        ({"a": 100, "b": 1, "c": 1}, 102, {"a": 100, "b": 1, "c": 1}),
        ({"a": 50, "b": 50, "c": 1}, 2, {"a": 1, "b": 1}),
    ],
)
def test_each_dataset_is_held_out_in_its_share(sizes, n, counts):
    source = Named(sizes)
    chosen = draw_held_out_samples(source, n, 0)
    assert {name: len(which) for name, which in chosen.items()} == counts
    assert sum(counts.values()) == n
    for name, which in chosen.items():
        assert len(set(which)) == len(which)
        assert not name or {source.dataset_of(i) for i in which} == {name}
