"""Answers in batches over devices against one at a time, and how few programs they take."""

from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from dflop_jax.config import Config, DataConfig, ModelConfig
from dflop_jax.data import ByteTokenizer
from dflop_jax.generate import programs as programs_module
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.mesh import PARAMS_SHARE, min_tp
from dflop_jax.generate.prompt import prompt_sample
from dflop_jax.generate.sampling import Sampling
from dflop_jax.train.load_params import LoadedParams
from dflop_jax.train.run_context import build_model
from tests.generate.likeliest import n_compiled

CONFIG = Config(model=ModelConfig(size="nano"), data=DataConfig(max_tiles=2))
PROMPTS = ("Is it red?", "What colour has the triangle to the left of the circle?", "Why", "?" * 90)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Prompts of several lengths, with no picture, one or two."""
    folder = tmp_path_factory.mktemp("batches")
    for k in range(2):
        Image.new("RGB", (60 + 140 * k, 40), (220, 30 * k, 30)).save(folder / f"{k}.png")
    model, tokenizer = build_model(CONFIG.model), ByteTokenizer()
    return [
        prompt_sample(
            text,
            {"image": [folder / f"{i}.png" for i in range(k % 3)]},
            CONFIG.data,
            model,
            tokenizer,
        )
        for k, text in enumerate(PROMPTS)
    ]


@pytest.fixture(autouse=True)
def _random_parameters(monkeypatch):
    """In the place of a checkpoint's: large enough for answers that do not repeat themselves."""

    def load(run, model, structs, **_):
        def draw(path, s):
            seed = sum(map(ord, jax.tree_util.keystr(path)))
            noise = 0.3 * np.random.default_rng(seed).normal(size=s.shape)
            value = (noise + (path[-1].key == "scale")).astype(s.dtype)
            return jax.device_put(value, s.sharding)

        return LoadedParams(jax.tree_util.tree_map_with_path(draw, structs), 7, Path(run))

    monkeypatch.setattr("dflop_jax.generate.generate.load_params", load)


def generator(rows, tp=1, devices=None, config=CONFIG):
    return Generator(config, "run", devices, rows=rows, tp=tp)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("rows, tp", [(4, 1), (4, 2), (2, 4), (3, 8), (5, 4)])
@pytest.mark.parametrize(
    "how", [Sampling(8), Sampling(8, 1.0, 0.9, 3, 40)], ids=["greedy", "drawn"]
)
def test_answers_together_equal_those_alone(samples, rows, tp, how):
    alone = generator(1, devices=jax.devices()[:1])
    want = [alone.answers([s], how, [k])[0] for k, s in enumerate(samples)]
    together = generator(rows, tp)
    assert together.ranks == min(rows, 8 // tp)
    found = []
    for first in range(0, len(samples), rows):
        some = range(first, min(first + rows, len(samples)))
        found += together.answers([samples[k] for k in some], how, some)
    assert found == want
    assert len({s.tokens for s in want}) == len(want)


def test_few_programs_answer_all(samples):
    some = generator(2, devices=jax.devices()[:1])
    for _ in range(2):
        for pair in ((0, 2), (1, 3), (2, 1), (3, 0)):
            some.answers([samples[k] for k in pair], Sampling(6))
    # The prompts have one or two sizes of tokens, and two or three of pictures.
    assert n_compiled(some.programs) <= 7


def test_a_cache_grows_as_the_answer_does(samples, monkeypatch):
    wide = generator(2, 2).answers(samples[:2], Sampling(60))
    monkeypatch.setattr(programs_module, "TOKEN_MULTIPLE", 8)
    monkeypatch.setattr(programs_module, "ANSWER_TOKENS", 4)
    growing = generator(2, 2)
    assert growing.answers(samples[:2], Sampling(60)) == wide
    assert growing.programs.grow._cache_size() >= 1


class Full:
    """A device here that has so many bytes."""

    process_index, platform = 0, "gpu"

    def __init__(self, n_bytes):
        self.n_bytes = n_bytes

    def memory_stats(self):
        return {"bytes_limit": self.n_bytes}


def test_no_device_holds_all_where_one_cannot():
    """Bytes of parameters on every device, of as many as are asked for by what one has."""
    alone = generator(1, devices=jax.devices()[:1])
    total = sum(a.nbytes for a in jax.tree.leaves(alone.loaded.params))
    room = total / PARAMS_SHARE
    wanted = {1.01 * room: 1, 0.99 * room: 2, 0.4 * room: 4, 0.13 * room: 8, 0.01 * room: 8}
    model = build_model(CONFIG.model)
    for n_bytes, tp in wanted.items():
        assert min_tp(model, [Full(n_bytes)] * 8) == tp
    for tp in (2, 4):
        split = generator(1, tp)
        held = dict.fromkeys(split.mesh.devices.flat, 0)
        for a in jax.tree.leaves(split.loaded.params):
            for shard in a.addressable_shards:
                held[shard.device] += shard.data.nbytes
        whole = sum(a.nbytes for a in jax.tree.leaves(split.loaded.params) if a.is_fully_replicated)
        assert len(held) == tp
        assert set(held.values()) == {(total - whole) / tp + whole}
        assert whole < 0.2 * total  # vectors, and what the devices do not divide
