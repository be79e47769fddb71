"""What `dflop export` writes of a run that began with published weights, and what it refuses."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cli import main
from dflop_jax.contract import edges_of
from dflop_jax.train.load_params import (
    check_only_adapters,
    find_published_folders,
    find_tokenizer_folders,
    load_params,
    open_params,
    warn_unexportable_adapters,
)
from dflop_jax.train.optimizer import configure_model
from dflop_jax.train.trainer import Trainer
from dflop_jax.weights import Folder, read_params, write_folder
from models import llava
from tests.plans import NANO, nano_profile
from tests.weights.conftest import held, random_params

MODEL = llava.build("anyres-nano")


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
        (["empty", "--out", "empty"], "empty: already exists; choose another --out"),
    ],
)
def test_export_refuses_in_one_line(args, says, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["export", *args]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_run_is_exported_as_it_was_saved(capsys):
    params = random_params(MODEL, 1)
    write_folder("hf", MODEL.weights, held(params), dtype="bfloat16")
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    about = {"size": {"height": 32, "width": 32}, **halves}
    Path("hf/preprocessor_config.json").write_text(json.dumps(about))
    Path("hf/tokenizer.json").write_text("{}")
    tied = tuple(m for m, module in MODEL.modules.items() if module.tied)
    plan = NANO.with_layout(edges=edges_of(MODEL), tied=tied)
    model = ModelConfig(size="anyres-nano", weights=("hf",))
    train, every = replace(config().train, ema=0.75), CheckpointConfig(every=1)
    start = config(model=model, train=train, checkpoint=every)
    result = Trainer(start, plan=plan, profile=nano_profile()).fit()
    assert np.isfinite(result.losses).all()
    assert main(["export", "runs/run", "--out", "out", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["step"] == 2
    files = ["config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"]
    assert made["files"] == files
    before, after = on_host("hf"), on_host("out")
    trained = load_params("runs/run", MODEL, jax.devices()[0]).params

    def written_as_read(a, b):  # in the type that the folder came with
        np.testing.assert_array_equal(a, np.asarray(b).astype(jax.numpy.bfloat16).astype(a.dtype))

    jax.tree.map(written_as_read, after, trained)
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before, after)))]
    assert np.mean(np.array(moved) > 0) > 0.5
    assert max(moved) < 0.05  # two steps from there, not from somewhere else

    assert main(["export", "runs/run", "--out", "exact", "--dtype", "fp32"]) == 0
    assert main(["export", "runs/run", "--out", "mean", "--ema", "--dtype", "float32"]) == 0
    first = load_params("runs/run/checkpoints/00000001", MODEL, jax.devices()[0]).params
    mean = jax.tree.map(
        lambda p0, p1, p2: 0.75 * (0.75 * p0 + 0.25 * np.asarray(p1)) + 0.25 * np.asarray(p2),
        before, first, trained,
    )  # fmt: skip
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=2e-7), on_host("mean"), mean)

    # Rows of a stack are read alone.
    store = CheckpointStore(Path("runs/run/checkpoints"))
    for name, tree in open_params(store.open(2), MODEL).items():
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), tree, trained[name]
        )
        for leaf, known in zip(*map(jax.tree.leaves, (tree["layers"], trained[name]["layers"]))):
            assert (leaf.shape, leaf.dtype) == (known.shape, known.dtype)
            np.testing.assert_array_equal(leaf[1], known[1])

    # One that begins with this run began with the published folder.
    Path("runs/next/checkpoints").mkdir(parents=True)
    again = replace(start, model=replace(model, weights=("runs/run@1",)))
    Path("runs/next/config.json").write_bytes(msgspec.json.encode(again))
    assert find_published_folders(("runs/next", "vision=runs/run")) == {"": "hf", "vision": "hf"}


def changed(pair, rank, alpha):
    """What an adapter adds to a stack of matrices, or to one, flat: [*stack, in x out]."""
    a, b = np.asarray(pair["a"], np.float64), np.asarray(pair["b"], np.float64)
    stack = a.shape[: a.ndim - 2] if a.ndim == b.ndim == 2 else a.shape[:1]
    a, b = a.reshape(*stack, -1, rank), b.reshape(*stack, rank, -1)
    return alpha / rank * (a @ b)


@pytest.mark.slow
def test_adapters_are_folded_in():
    params = random_params(MODEL, 1)
    write_folder("hf", MODEL.weights, held(params), dtype="bfloat16")
    start = config(model=ModelConfig(size="anyres-nano", weights=("hf",)))
    # By these rates two steps move adapters far.
    train = replace(
        start.train, lora_rank=2, lora_targets=("llm", "connector"), learning_rate=0.05,
        warmup_steps=0,
    )  # fmt: skip
    asked = replace(start, train=train)
    tied = tuple(m for m, module in MODEL.modules.items() if module.tied)
    plan = NANO.with_layout(edges=edges_of(MODEL), tied=tied)
    Trainer(asked, plan=plan, profile=nano_profile()).fit()
    model = configure_model(MODEL, train)
    reader = CheckpointStore(Path("runs/run/checkpoints")).open(2)
    saved = {n: jax.tree.map(np.asarray, tree) for n, tree in open_params(reader, model).items()}
    assert main(["export", "runs/run", "--out", "out"]) == 0
    before, after = on_host("hf"), on_host("out")
    for name, part, adapter in (("llm", "layers", "adapter"), ("vision", "exit", "exit_adapter")):
        for matrix, pair in saved[name][adapter].items():
            moved = changed(pair, 2, train.lora_alpha)
            kernel = after[name][part].pop(matrix)["kernel"]
            original = before[name][part].pop(matrix)["kernel"]
            sums = original.astype(np.float64).reshape(moved.shape) + moved
            np.testing.assert_allclose(kernel.reshape(moved.shape), sums, rtol=2**-8, atol=1e-6)
            assert np.abs(moved).max() > 0.01
    jax.tree.map(np.testing.assert_array_equal, after, before)  # nothing else has moved


ADAPTERS = MODEL.with_lora(2, 4.0, targets=("llm",))


@pytest.mark.parametrize(
    "train, frozen, says",
    [
        ({}, (), "has no adapters; train with train.lora_rank"),
        ({"lora_rank": 2}, ("llm", "vision"), "also trains connector, which adapters do not hold"),
        ({"lora_rank": 2, "learning_rates": ("connector=1e-3",)},
         ("llm", "vision", "connector"), ""),
    ],
)  # fmt: skip
def test_what_adapters_do_not_hold_is_named(train, frozen, says, caplog):
    lora = replace(Config(), train=replace(Config().train, **train))
    model = configure_model(MODEL, lora.train)
    warn_unexportable_adapters(lora, model, frozen)  # before training
    said = [m for m in caplog.messages if "--adapter will refuse this run" in m]
    assert [says in m for m in said] == [True] * bool(says and train)
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        check_only_adapters(lora, model, frozen)


@pytest.mark.parametrize(
    "before, says",
    [({"lora_rank": 0}, "started from parameters of a"), ({"lora_rank": 2}, ""),
     ({"lora_rank": 2, "stage": "llm"}, "started from parameters of a")],
)  # fmt: skip
@pytest.mark.parametrize("item", ["b", "b@3", "llm=b"])
def test_adapters_are_of_published_weights(before, says, item):
    """Run b trained adapters, and began with run a."""
    for name, weights, train in (("a", ("hf",), before), ("b", ("a",), {"lora_rank": 2})):
        Path(name, "checkpoints").mkdir(parents=True)
        run = replace(Config(), train=replace(Config().train, **train))
        run = replace(run, model=replace(run.model, weights=weights))
        Path(name, "config.json").write_bytes(msgspec.json.encode(run))
    lora = replace(Config(), model=replace(Config().model, weights=(item,)))
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        check_only_adapters(lora, ADAPTERS, ("llm", "vision", "connector"))


def test_files_beside_come_from_the_data_s_tokenizer_first():
    for name in ("tok", "llm", "tower"):
        Path(name).mkdir()
    start = config(model=ModelConfig(weights=("vision=tower", "llm=llm")))
    asked = replace(start, data=replace(start.data, tokenizer="tok"))
    assert find_tokenizer_folders(asked) == [Path("tok"), Path("llm"), Path("tower")]
    assert find_tokenizer_folders(config()) == []
