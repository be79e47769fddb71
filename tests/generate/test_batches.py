"""Answers in batches over devices, or to a file of prompts, against one at a time, and how few
programs they take."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from dflop_jax.cli import main
from dflop_jax.config import Config, DataConfig, ModelConfig
from dflop_jax.data import ByteTokenizer
from dflop_jax.generate import programs as programs_module
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.programs import PARAMS_SHARE, min_tp
from dflop_jax.generate.prompt import prompt_sample
from dflop_jax.generate.sampling import Sampling
from dflop_jax.train.load_params import LoadedParams
from dflop_jax.train.run_context import build_model

CONFIG = Config(model=ModelConfig(size="nano"), data=DataConfig(max_tiles=2))
PROMPTS = ("Is it red?", "What colour has the triangle to the left of the circle?", "Why", "?" * 90)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Prompts of several lengths, with no picture, one or two."""
    folder = tmp_path_factory.mktemp("batches")
    for k in range(2):
        Image.new("RGB", (60 + 140 * k, 40), (220, 30 * k, 30)).save(folder / f"{k}.png")
    model, tokenizer = build_model(CONFIG.model), ByteTokenizer()
    media = [{"image": [folder / f"{i}.png" for i in range(k % 3)]} for k in range(len(PROMPTS))]
    return [
        prompt_sample(text, files, CONFIG.data, model, tokenizer)
        for text, files in zip(PROMPTS, media, strict=True)
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


def generator(rows, tp=1, devices=None):
    return Generator(CONFIG, "run", devices, rows=rows, tp=tp)


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


def test_a_cache_grows_as_the_answer_does(samples, monkeypatch):
    wide = generator(2, 2).answers(samples[:2], Sampling(60))
    monkeypatch.setattr(programs_module, "TOKEN_MULTIPLE", 8)
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


EXPERIMENT = """
from dflop_jax import Config, DataConfig, ModelConfig

def config():
    return Config(model=ModelConfig(size="nano"),
                  data=DataConfig(max_tiles=2, max_tokens=128, workers=2), cache_dir="cache")
"""


def test_answers_to_a_file_of_prompts_are_those_to_each_prompt(tmp_path, capsys, monkeypatch):
    jax.devices()
    monkeypatch.chdir(tmp_path)
    Path("nano.py").write_text(EXPERIMENT)
    Path("ask").mkdir()
    Image.new("RGB", (60, 40), (220, 30, 30)).save("ask/red.png")
    Image.new("RGB", (200, 30), (20, 170, 50)).save("wide.png")
    wide = str(tmp_path / "wide.png")
    prompts = [
        {"prompt": "What?", "image": ["red.png"]},
        {"prompt": "x" * 200},
        {"prompt": "Who is <image> and <image>?", "image": ["red.png", wide]},
        {"prompt": "Why?"},
        {"prompt": "<image> Where?"},
        {"prompt": "When?", "image": "gone.png"},
    ]
    file = Path("ask/prompts.jsonl")
    file.write_text("\ufeff" + "\n\n".join(map(json.dumps, prompts)), encoding="utf-8")
    args = ("nano.py", "--prompts", str(file), "--max-tokens", "4", "--batch", "2")
    assert main(["generate", *args]) == 0
    out, err = capsys.readouterr()
    assert "3 of 6 prompts were not answered; the first: the prompt's" in " ".join(err.split())
    answers = [json.loads(line) for line in out.splitlines()]
    assert [a["prompt"] for a in answers] == [p["prompt"] for p in prompts]
    assert [bool(a["error"]) for a in answers] == [False, True, False, False, True, True]
    assert main(["generate", *args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answers
    alone_generator = generator(1, tp=0)
    for k in (0, 2, 3):
        images = [file.parent / f for f in prompts[k].get("image", ())]
        alone = alone_generator.answer(prompts[k]["prompt"], {"image": images}, Sampling(4))
        found = (answers[k]["answer"], tuple(answers[k]["tokens"]), answers[k]["stopped"])
        assert found == (alone.answer, alone.tokens, alone.stopped)
