"""Text to video under plans: gradients equal the plain computation, runs resume, clips come out."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig, Trainer
from dflop_jax.cli import main
from dflop_jax.config import CheckpointConfig
from dflop_jax.contract import edges_of, with_adapter
from dflop_jax.data.datasets import clips
from dflop_jax.data.datasets.clip_lists import draw_clips, frames_of
from dflop_jax.generate.clip import write_clip
from dflop_jax.records import (
    Bucket,
    DataProfile,
    LayerTiming,
    Layout,
    Plan,
    Prices,
    Profile,
    Recompute,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.schedule.batch_scheduler import schedule_batch
from models import wan
from tests.plans import graph_plan, profile_of, programs
from tests.runtime import plain
from tests.runtime.test_gradients import assert_norm, assert_trees_close, grads_of, trained

MODEL = wan.build("nano+wan-nano")
SHAPES = {"llm": Shape(2, 64), "generator": Shape(2, 96)}
LAYOUTS = {  # see `graph_plan`
    "apart": {
        "llm": [(1, 0, (1, 1, 1), "segment"), (4, 1)],
        "generator": [(1, 2, (1, 1, 1), "layers"), (2, 3, (1, 1, 1), "dots")],
    },
    "stages, ranks, heads": {
        "llm": [(4, 0, (2, 1, 1), "named")],
        "generator": [(2, 4, (1, 2, 2), "none")],
    },
}
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


# ---- gradients ----


def make_plan(layout):
    return graph_plan(MODEL, LAYOUTS[layout], SHAPES, tied=())


@functools.cache
def samples_of(path):
    source = clips.make_clip_source(DataConfig(path=path), MODEL, "train")
    return [source.sample(i) for i in range(len(source))]


def plain_loss(model, params, fields, heard, scale):
    """The loss of one sample, both modules run plainly on it alone."""
    states = None
    for name, module in model.modules.items():
        batch = {k: jnp.asarray(v)[None] for k, v in fields[name].items()}
        n = next(iter(batch.values())).shape[1]
        batch["segment_ids"] = jnp.ones((1, n), jnp.int32)
        if name == "llm":
            batch["positions"] = jnp.arange(n, dtype=jnp.int32)[None]
        else:
            taken = jnp.where(heard >= 0, states[jnp.maximum(heard[:, 0], 0)], 0.0)
            batch["text"] = taken[None]
        x = module.entry(with_adapter("entry", params[name]), batch)
        for i in range(module.n_layers):
            layer = jax.tree.map(lambda a, i=i: a[i], with_adapter("layers", params[name]))
            x = module.layer(layer, x, batch)
        out = module.exit(with_adapter("exit", params[name]), x, batch)
        if name == "llm":
            states = out[0]
    return scale * out["loss_sum"]


@pytest.fixture(scope="module")
def oracle(folder):
    """(samples, parameters, scale, loss, gradients), one sample at a time on one device."""
    samples = samples_of(str(folder / "clips.json"))
    params = plain.fresh_params(MODEL, make_plan("apart"))
    scale = 1.0 / sum(float(s.fields["generator"]["weights"].sum()) for s in samples)
    every_args = [(s.fields, s.gathers["llm", "generator"].index, scale) for s in samples]
    value_and_grad = jax.jit(jax.value_and_grad(functools.partial(plain_loss, MODEL)))
    return samples, params, scale, *plain.summed(value_and_grad, params, every_args)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "layout, freeze",
    [("stages, ranks, heads", ()), ("apart", ("llm",))],
)
def test_gradients_of_plans_equal_plain_computation(layout, freeze, oracle):
    samples, params, scale, want_loss, want = oracle
    plan = make_plan(layout)
    names = [s.name for s in plan.layout.segments]
    loads = [s.load for s in samples]
    schedule = schedule_batch(loads, plan, Prices(programs(plan)), names, work=0)
    loss, grads, start, result = grads_of(
        MODEL, plan, samples, schedule, scales={"generator": scale}, freeze=freeze
    )
    jax.tree.map(np.testing.assert_array_equal, start, params)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    own = trained(MODEL, want, freeze)
    assert_norm(result, own)
    assert all(np.abs(w).max() > 0 for w in jax.tree.leaves(own))
    assert_trees_close(grads, own)


# ---- pictures ----


def test_an_embedded_clip_is_written_as_a_strip_and_a_moving_picture(tmp_path):
    latents = draw_clips("", 4, 0, "train", 48)[1].read()
    frames = frames_of(latents, 4)
    strip, moving = write_clip(tmp_path, latents, embedded=True)[1:]
    side = frames.shape[1]
    with Image.open(strip) as image:
        pixels = np.asarray(image)[:: image.height // side, :: image.height // side]
    np.testing.assert_array_equal(pixels, np.concatenate(frames, axis=1))
    with Image.open(moving) as image:
        assert image.n_frames == len(frames)


# ---- runs ----


def config(folder) -> Config:
    return Config(
        model=ModelConfig(factory="models.wan:build", size="nano+wan-nano"),
        data=DataConfig(path=str(folder / "clips.json")),
        plan=PlanConfig(policy="dflop", devices=2, max_model=1, max_stage=1, buckets=1,
                        max_microbatches=2, effort="quick", finalists=1),
        train=TrainConfig(steps=4, global_batch=4, learning_rate=1e-3, warmup_steps=0,
                          final_lr_fraction=1.0, eval_samples=2),
        checkpoint=CheckpointConfig(every=1),
        run_dir=str(folder / "run"),
        cache_dir=str(folder / "cache"),
    )  # fmt: skip


PLAN = Plan(
    "dflop",
    Layout(
        (SubmeshPlan("llm", 0, 1, 1, 1), SubmeshPlan("generator", 1, 1, 1, 1)),
        (
            SegmentPlan("llm", "llm", 0, 4, "llm", True, True),
            SegmentPlan("generator", "generator", 0, 2, "generator", True, True),
        ),
        (Bucket.from_shapes({"llm": Shape(1, 32), "generator": Shape(1, 64)}),),
        edges=edges_of(MODEL),
    ),
)


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
