"""A run that begins with published weights and holds what is frozen of their matrices in 8 bits:
what it holds, says, and gives away."""

import json
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax import CheckpointConfig, ModelConfig
from dflop_jax.checkpoint.reader import CheckpointReader
from dflop_jax.cli import main
from dflop_jax.contract import edges_of
from dflop_jax.generate.decoding import inlets_of, prefill
from dflop_jax.generate.generate import Generator
from dflop_jax.train.load_params import load_params
from dflop_jax.train.trainer import Trainer
from dflop_jax.weights import Folder, write, write_folder
from models import llava
from tests.plans import NANO, nano_profile
from tests.train.lora_cases import restored
from tests.train.test_published_run import _here, config, on_host  # noqa: F401
from tests.weights.conftest import held, random_params, rounded_by_hand

MODEL = llava.build("anyres-nano")
FROZEN = ("connector", "llm", "vision")
RANK, ALPHA = 2, 16.0
TOKENS = 12


def asked(**more):
    """Rates by which two steps move adapters far."""
    model = ModelConfig(size="anyres-nano", weights=("hf",), quantize_frozen="int8")
    train = replace(
        config().train, lora_rank=RANK, lora_targets=("llm", "connector"), freeze=("vision",),
        learning_rate=0.05, warmup_steps=0,
    )  # fmt: skip
    saves = CheckpointConfig(every=2)
    return config(model=model, train=train, checkpoint=saves, **more)


def changed(pair):
    """What an adapter adds to a stack of matrices, or to one, flat: [*stack, in x out]."""
    a, b = np.asarray(pair["a"], np.float64), np.asarray(pair["b"], np.float64)
    stack = a.shape[: a.ndim - 2] if a.ndim == b.ndim == 2 else a.shape[:1]
    a, b = a.reshape(*stack, -1, RANK), b.reshape(*stack, RANK, -1)
    return ALPHA / RANK * (a @ b)


class Alive:
    """Bytes of arrays that are held at once: of those that some functions gave, and of jax's."""

    def __init__(self, monkeypatch, *where):
        self.sizes, self.peak, self.largest, self.total = {}, 0, 0, 0
        self.before = self.of_jax()
        for place, name in where:
            monkeypatch.setattr(place, name, self.watched(getattr(place, name)))

    def of_jax(self):
        return sum(a.nbytes for a in jax.live_arrays())

    def watched(self, function):
        def call(*args, **kwargs):
            array = function(*args, **kwargs)
            self.sizes[id(array)] = array.nbytes
            weakref.finalize(array, self.sizes.pop, id(array))
            held = sum(self.sizes.values()) + self.of_jax() - self.before
            self.peak, self.largest = max(self.peak, held), max(self.largest, array.nbytes)
            self.total += array.nbytes
            return array

        return call


def refusal(capsys, *args):
    capsys.readouterr()
    assert main(["export", "runs/run", "--out", "no", *args]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not Path("no").exists()
    return said


def logits(model, params):
    """Of tokens without pictures."""
    llm, rng = model.modules["llm"], np.random.default_rng(0)
    names = {n for part in ("entry", "layers") for n in llm.inputs[part]}
    specs = {n: llm.field_spec(n, 1, TOKENS) for n in names}
    batch = {n: jnp.zeros(s.shape, s.dtype) for n, s in specs.items()}
    batch["tokens"] = jnp.asarray(rng.integers(0, 200, (1, TOKENS)), jnp.int32)
    batch["segment_ids"] = jnp.ones((1, TOKENS), jnp.int32)
    batch["positions"] = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    last = jnp.array([TOKENS - 1])
    return np.asarray(prefill(llm, params["llm"], batch, last, TOKENS, inlets_of(model))[0])


@pytest.mark.slow
def test_from_a_folder_and_back(capsys, monkeypatch):
    params = jax.tree.map(lambda a: 0.05 * a, random_params(MODEL, 1))
    write_folder("hf", MODEL.weights, held(params), dtype="bfloat16")
    tied = tuple(m for m, module in MODEL.modules.items() if module.tied)
    plan = NANO.with_layout(edges=edges_of(MODEL), tied=tied)
    result = Trainer(asked(), plan=plan, profile=nano_profile()).fit()
    assert np.isfinite(result.losses).all()

    # What it holds are the folder's matrices, rounded, and they do not move.
    before = on_host("hf")
    model = MODEL.with_lora(RANK, ALPHA, targets=("llm", "connector")).with_quantized(FROZEN)
    saved = load_params("runs/run", model, jax.devices()[0], fold=False).params
    want = rounded_by_hand(MODEL.with_quantized(FROZEN), before)
    adapters = {"vision": {"exit_adapter"}, "llm": {"adapter"}}
    for name, parts in saved.items():
        assert parts.keys() - want[name].keys() == adapters[name]
        jax.tree.map(np.testing.assert_array_equal, {p: parts[p] for p in want[name]}, want[name])

    # It answers by them, beside adapters that are folded into nothing.
    generator = Generator(asked(), "runs/run")
    held_here = generator.loaded.params["llm"]
    assert held_here["layers"]["up"]["kernel"].dtype == np.int8
    dense = restored(jax.device_get(generator.loaded.params))
    for name, pair in dense["llm"].pop("adapter").items():
        kernel = dense["llm"]["layers"][name]["kernel"]
        dense["llm"]["layers"][name]["kernel"] = kernel + np.float32(changed(pair)).reshape(
            kernel.shape
        )
    folded = load_params("runs/run", model, jax.devices()[0]).params["llm"]["layers"]
    for name in ("query", "down", "attn_norm"):
        jax.tree.map(
            partial(np.testing.assert_allclose, atol=1e-6), folded[name],
            dense["llm"]["layers"][name],
        )  # fmt: skip
    says = logits(generator.model, generator.loaded.params)
    np.testing.assert_allclose(says, logits(MODEL, dense), atol=1e-5 * np.abs(says).max())

    # An export starts from the folder's own.
    with monkeypatch.context() as patch:
        read = ((CheckpointReader, "read"), (Folder, "read"))
        alive = Alive(patch, *read, (write, "as_in_file"))
        assert main(["export", "runs/run", "--out", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    # Of all that is read and folded, no more at once than a few matrices of a layer.
    assert alive.peak <= 2 * alive.largest
    assert alive.largest < Path("out/model.safetensors").stat().st_size / 2 < alive.total
    after = on_host("out")
    for name, part, adapter in (("llm", "layers", "adapter"), ("vision", "exit", "exit_adapter")):
        for matrix, pair in saved[name][adapter].items():
            moved = changed(pair)
            kernel = after[name][part].pop(matrix)["kernel"]
            original = before[name][part].pop(matrix)["kernel"]
            sums = original.astype(np.float64).reshape(moved.shape) + moved
            np.testing.assert_allclose(kernel.reshape(moved.shape), sums, rtol=2**-8, atol=1e-6)
            assert np.abs(moved).max() > 0.01
    jax.tree.map(np.testing.assert_array_equal, after, before)
    written = Path("out/model.safetensors").read_bytes()

    # Which has to be there, and the same.
    Path("hf").rename("moved")
    said = refusal(capsys)
    assert "model.weights=hf is gone" in said
    assert "--weights" in said
    assert main(["export", "runs/run", "--out", "again", "--weights", "moved"]) == 0
    assert Path("again/model.safetensors").read_bytes() == written
    write_folder("other", MODEL.weights, held(random_params(MODEL, 2)))
    assert "is not what the run began with" in refusal(capsys, "--weights", "other")
    assert main(["export", "runs/run", "--out", "alone", "--adapter"]) == 0
