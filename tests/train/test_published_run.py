"""Published weights in, a run, published weights out; and a run on pictures, clips and sound."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.cli import main
from dflop_jax.contract import edges_of
from dflop_jax.records import Bucket, Layout, Plan, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.train.trainer import Trainer
from dflop_jax.weights import Folder, read_params
from models import llava, omni
from tests.data.media_cases import made_dataset
from tests.plans import nano_profile
from tests.weights.conftest import random_params

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
    sizes = ("layer_dims", "ends_dims", "n_layers", "entry_share", "piece_tokens")
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
                Bucket.from_shapes(
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
