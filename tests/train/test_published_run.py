"""Published weights in, a run, published weights out; and a run on pictures, clips and sound."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.cli import main
from dflop_jax.contract import edges_of
from dflop_jax.records import Bucket, Layout, Plan, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.train.initial import first_weights
from dflop_jax.train.load_params import load_params
from dflop_jax.train.trainer import Trainer
from dflop_jax.weights import Folder, read_params, write_folder
from models import llava, omni
from tests.data.media_cases import made_dataset
from tests.plans import NANO, nano_profile
from tests.weights.conftest import held, random_params

MODEL = llava.build("anyres-nano")
OMNI = omni.build("omni-nano")
OMNI_EDGES = edges_of(OMNI)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    jax.devices()  # started with conftest's 8, so that plan.devices cannot change their number
    monkeypatch.chdir(tmp_path)


def config(**more):
    start = Config(
        data=DataConfig(n_samples=32, max_tiles=2, max_frames=2, max_tokens=512, workers=1),
        plan=PlanConfig(
            policy="dflop",
            devices=2, max_model=1, max_stage=1, buckets=2, sampled_batches=1, max_microbatches=2,
            effort="quick",
        ),
        train=TrainConfig(steps=2, global_batch=4),
        checkpoint=CheckpointConfig(every=2),
    )  # fmt: skip
    return replace(start, **more)


def omni_profile():
    """`nano_profile` with a third module, as made up as it is."""
    made = nano_profile()
    model = made.model
    audio = tuple(replace(t, module="audio") for t in model.timings if t.module == "vision")
    sizes = ("layer_param_bytes", "ends_param_bytes", "n_layers", "entry_share", "piece_tokens")
    more = {f: {"audio": getattr(model, f)["vision"], **getattr(model, f)} for f in sizes}
    timings = model.timings + audio
    return replace(made, model=replace(model, timings=timings, edges=OMNI_EDGES, **more))


def on_host(folder):
    """Parameters in a published folder."""
    found = Folder(folder, MODEL.weights)
    found.check()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), random_params(MODEL, 0)
    )
    return {m: jax.device_get(read_params(found, m, s)) for m, s in structs.items()}


@pytest.mark.slow
def test_weights_in_and_out(tmp_path, capsys):
    params = random_params(MODEL, 1)
    write_folder("hf", MODEL.weights, held(params), dtype="bfloat16")
    model = ModelConfig(size="anyres-nano", weights=("hf",))
    train = replace(config().train, ema=0.75)
    every = CheckpointConfig(every=1)
    tied = tuple(m for m, module in MODEL.modules.items() if module.tied)
    plan = NANO.with_layout(edges=edges_of(MODEL), tied=tied)
    start = config(model=model, train=train, checkpoint=every)
    result = Trainer(start, plan=plan, profile=nano_profile()).fit()
    assert np.isfinite(result.losses).all()
    assert main(["export", "runs/run", "--out", "out", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["step"] == 2
    assert made["files"] == ["config.json", "model.safetensors"]
    before, after = on_host("hf"), on_host("out")
    trained = load_params("runs/run", MODEL, jax.devices()[0]).params

    def written_as_read(a, b):  # in the type that the folder came with
        np.testing.assert_array_equal(a, np.asarray(b).astype(jax.numpy.bfloat16).astype(a.dtype))

    jax.tree.map(written_as_read, after, trained)
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before, after)))]
    assert np.mean(np.array(moved) > 0) > 0.5
    assert max(moved) < 0.05  # two steps from there, not from somewhere else

    assert main(["export", "runs/run", "--out", "mean", "--ema", "--dtype", "float32"]) == 0
    first = load_params("runs/run/checkpoints/00000001", MODEL, jax.devices()[0]).params
    mean = jax.tree.map(
        lambda p0, p1, p2: 0.75 * (0.75 * p0 + 0.25 * np.asarray(p1)) + 0.25 * np.asarray(p2),
        before, first, trained,
    )  # fmt: skip
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=2e-7), on_host("mean"), mean)

    # One that begins with this run began with the published folder.
    Path("runs/next/checkpoints").mkdir(parents=True)
    again = replace(start, model=replace(model, weights=("runs/run@1",)))
    Path("runs/next/config.json").write_bytes(msgspec.json.encode(again))
    assert first_weights(("runs/next", "vision=runs/run")) == {"": "hf", "vision": "hf"}


@pytest.mark.parametrize(
    "args, says",
    [
        (["gone", "--out", "x"], "gone: no such run folder"),
        (["empty", "--out", "x"], "no config.json"),
        (["empty", "--out", "empty"], "empty: exists already; choose another --out"),
    ],
)
def test_export_refuses_in_one_line(args, says, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["export", *args]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_pictures_clips_and_sound_in_one_run(tmp_path):
    model = ModelConfig(factory="models.omni:build", size="omni-nano")
    data = replace(
        config().data, path=str(made_dataset(tmp_path / "data", 6)), max_tokens=256,
        max_bad_fraction=1.0,
    )  # fmt: skip
    plan = Plan(
        "dflop",
        Layout(
            tuple(SubmeshPlan(m, i, 1, 1, 1) for i, m in ((0, "vision"), (0, "audio"), (1, "llm"))),
            tuple(
                SegmentPlan(m, m, 0, n, m, True, True)
                for m, n in (("vision", 2), ("audio", 2), ("llm", 4))
            ),
            (
                Bucket.of(
                    {
                        "vision": Shape(16, OMNI.piece_tokens["vision"]),
                        "audio": Shape(16, OMNI.piece_tokens["audio"]),
                        "llm": Shape(1, 256),
                    }
                ),
            ),
            edges=OMNI_EDGES,
            tied=tuple(m for m, module in OMNI.modules.items() if module.tied),
        ),
    )
    result = Trainer(config(model=model, data=data), plan=plan, profile=omni_profile()).fit()
    assert np.isfinite(result.losses).all()
    assert result.compiles_after_warmup == 0
    rows = [json.loads(r) for r in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["padding_fraction"].keys() == {"vision", "audio", "llm"}
    assert sum(row["n_bad"] for row in rows) == 0
