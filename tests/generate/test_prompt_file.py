"""Answers to a file of prompts, in its order, equal to those to each prompt alone."""

import json
from pathlib import Path

import jax
import pytest
from PIL import Image

from dflop_jax.cli import main
from dflop_jax.config import Config, DataConfig, ModelConfig
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.prompt_file import read_prompts
from dflop_jax.generate.sampling import Sampling

from .test_batches import _random_parameters  # noqa: F401

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
    assert "3 of 6 prompts were not asked; the first: the prompt's" in " ".join(err.split())
    answers = [json.loads(line) for line in out.splitlines()]
    assert [a["prompt"] for a in answers] == [p["prompt"] for p in prompts]
    assert [bool(a["error"]) for a in answers] == [False, True, False, False, True, True]
    assert main(["generate", *args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answers
    generator = Generator(
        Config(model=ModelConfig(size="nano"), data=DataConfig(max_tiles=2, max_tokens=128)), "run"
    )
    for k in (0, 2, 3):
        images = [file.parent / f for f in prompts[k].get("image", ())]
        alone = generator.answer(prompts[k]["prompt"], {"image": images}, Sampling(4))
        found = (answers[k]["answer"], tuple(answers[k]["tokens"]), answers[k]["stopped"])
        assert found == (alone.answer, alone.tokens, alone.stopped)


def test_a_line_that_is_no_prompt_is_named(tmp_path):
    file = tmp_path / "ask.jsonl"
    for line, says in (
        ('{"prompt": 3}', "Expected `str`"),
        ("What?", "malformed"),
        ('{"image": "a.png"}', "missing required field"),
        ('{"prompt"', "truncated"),
    ):
        file.write_text(f'{{"prompt": "?"}}\n{line}\n')
        with pytest.raises(ValueError, match=rf"ask\.jsonl:2: .*{says}.*; write "):
            read_prompts(file)
