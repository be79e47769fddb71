"""Text to video: a run learns from clips, and clips come out."""

import functools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from PIL import Image

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig, Trainer
from dflop_jax.cli import main
from dflop_jax.config import CheckpointConfig
from dflop_jax.contract import edges_of
from dflop_jax.data.datasets import clips
from dflop_jax.data.datasets.clip_lists import draw_clips, latents_to_frames
from dflop_jax.generate.clip import write_clip
from dflop_jax.records import DataProfile, LayerTiming, Profile, Recompute, Shape
from models import wan
from tests.plans import graph_plan, profile_of

MODEL = wan.build("nano+wan-nano")
SIZES = ((4, 2, 2, 4), (4, 1, 4, 4))  # of latents; few, so that the oracle compiles few programs


def write_clips(folder, n=8, n_eval=2):
    """A list of clips with random latents, in both kinds of files; returns its path."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    records = []
    for k in range(n):
        latents = rng.normal(size=SIZES[k % 2]).astype(np.float32)
        name = f"{k}.npy" if k % 3 else f"{k}.safetensors"
        if k % 3:
            np.save(folder / name, latents)
        else:
            save_file({"latents": latents}, folder / name)
        split = "eval" if k < n_eval else "train"
        records.append({"caption": "a b" if k % 2 else "abcd", "latents": name, "split": split})
    (folder / "clips.json").write_text(json.dumps(records))
    return str(folder / "clips.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    jax.devices()  # all 8, before a run asks for fewer: other tests of this process need them
    found = tmp_path_factory.mktemp("t2v")
    write_clips(found)
    return found


@functools.cache
def samples_of(path):
    source = clips.make_clip_source(DataConfig(path=path), MODEL, "train")
    return [source.sample(i) for i in range(len(source))]


def test_a_built_in_clip_is_written_as_a_strip_and_a_moving_picture(tmp_path):
    latents = draw_clips("", 4, 0, "train", 48)[1].read()
    frames = latents_to_frames(latents, 4)
    strip, moving = write_clip(tmp_path, latents, is_built_in=True)[1:]
    side = frames.shape[1]
    with Image.open(strip) as image:
        pixels = np.asarray(image)[:: image.height // side, :: image.height // side]
    np.testing.assert_array_equal(pixels, np.concatenate(frames, axis=1))
    with Image.open(moving) as image:
        assert image.n_frames == len(frames)


def config(folder) -> Config:
    return Config(
        model=ModelConfig(factory="models.wan:build", size="nano+wan-nano"),
        data=DataConfig(path=str(folder / "clips.json")),
        plan=PlanConfig(policy="dflop", devices=2, max_model=1, max_stage=1, buckets=1,
                        max_microbatches=2, effort="quick"),
        train=TrainConfig(steps=4, global_batch=4, learning_rate=1e-3, warmup_steps=0,
                          final_lr_fraction=1.0, eval_samples=2),
        checkpoint=CheckpointConfig(every=1),
        run_dir=str(folder / "run"),
        cache_dir=str(folder / "cache"),
    )  # fmt: skip


SHAPES = {"llm": Shape(1, 32), "generator": Shape(1, 64)}
PLAN = replace(graph_plan(MODEL, {"llm": [(4, 0)], "generator": [(2, 1)]}, SHAPES), policy="dflop")


def made_up_profile(path):
    """With times in proportion to size."""
    sizes = (("llm", 1, 32), ("llm", 2, 32), ("generator", 1, 64), ("generator", 2, 64))
    timings = tuple(
        LayerTiming(m, 1, Shape(rows, tokens), *(1e-6 * rows * tokens * k for k in (1, 3, 1, 3)),
                    recompute={"none": Recompute()})
        for m, rows, tokens in sizes
    )  # fmt: skip
    layers = {m: module.n_layers for m, module in MODEL.modules.items()}
    model = profile_of(timings, layers, edges=edges_of(MODEL))
    return Profile(model, DataProfile("made up", 6, tuple(s.load for s in samples_of(path))))


@pytest.fixture(scope="module")
def run(compiled_once, folder):
    """Four steps over six clips, so that the last ones are of the second epoch."""
    profile = made_up_profile(str(folder / "clips.json"))
    return Trainer(config(folder), plan=PLAN, profile=profile).fit()


def test_a_clip_is_generated_and_the_generator_exported(run, folder, capsys):
    out = folder / "clip"
    asked = ["generate", str(folder / "run"), "--prompt", "a b", "--out", str(out), "--json"]
    assert main([*asked, "--flow-steps", "3", "--latents", "2,4,4"]) == 0
    said = json.loads(capsys.readouterr().out)
    latents = np.load(out / "latents.npy")
    assert latents.shape == tuple(said["shape"]) == (4, 2, 4, 4)
    assert np.isfinite(latents).all()
    assert main([*asked, "--flow-steps", "3"]) == 2
    assert "--latents TIME,ROWS,COLUMNS" in capsys.readouterr().err
    assert main([*asked, "--latents", "2,3,4"]) == 2
    assert "in multiples of 1, 2 and 2" in capsys.readouterr().err
    command = ["export", str(folder / "run"), "--out", str(folder / "out"), "--json"]
    assert main([*command, "--module", "generator"]) == 0
    assert (folder / "out" / "diffusion_pytorch_model.safetensors").is_file()
    capsys.readouterr()
    assert main([*command[:3], str(folder / "more"), "--module", "vision"]) == 2
    assert "known: llm, generator" in capsys.readouterr().err
