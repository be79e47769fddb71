"""What `dflop export` writes of a run, and what it refuses."""

import json
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

from dflop_jax import CheckpointConfig, Config, ModelConfig
from dflop_jax.checkpoint.reader import CheckpointReader
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cli import main
from dflop_jax.contract import edges_of
from dflop_jax.data.sample import FeatureGather, Sample
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.prompt import prompt_sample
from dflop_jax.generate.sampling import Sampling
from dflop_jax.records import Load
from dflop_jax.train.load_params import (
    check_only_adapters,
    find_published_folders,
    find_tokenizer_folders,
    load_params,
    open_params,
)
from dflop_jax.train.optimizer import configure_model
from dflop_jax.train.trainer import Trainer
from dflop_jax.verify import reference
from dflop_jax.verify.samples import mixed_samples
from dflop_jax.weights import Folder, write, write_folder
from models import llava
from tests.plans import NANO, nano_profile
from tests.train.test_published_run import _here, config, on_host  # noqa: F401
from tests.weights.conftest import held, random_params

MODEL = llava.build("anyres-nano")


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
    if not reference.missing_packages():
        check_answers("exact", capsys)
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


def up_to(sample, n):
    """The first `n` tokens of a sample, whose media all stand among them."""
    llm = {k: a[:n] for k, a in sample.fields["llm"].items()}
    places = {pair: FeatureGather(p.index[:n], p.weight) for pair, p in sample.gathers.items()}
    return Sample(sample.fields | {"llm": llm}, places, Load(sample.load.pieces | {"llm": (n,)}))


def check_answers(folder, capsys):
    """Greedy answers of a folder in batches, by the library and the commands, are those that
    transformers generates from it, token by token."""
    n, mixed = 12, mixed_samples(MODEL)
    theirs = reference._load_model(Path(folder), "LlavaOnevisionForConditionalGeneration")
    family = reference.FAMILIES["llava_onevision"]
    theirs.config.image_token_id, theirs.config.video_token_id = 0, family.video
    family.prepare(theirs.config)
    torch = pytest.importorskip("torch")

    def generated(ids, penalty=1.0, **media):
        given = {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)} | media
        given = {k: torch.from_numpy(np.asarray(a)) for k, a in given.items()}
        how = {"max_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = theirs.generate(**given, **how, repetition_penalty=penalty)
        return out[0, len(ids) :].tolist()

    wanted, prompts = [], []
    for m in mixed:
        llm = m.sample.fields["llm"]
        length = int(np.flatnonzero(llm["weights"] == 0)[-1]) + 1
        prompts.append(up_to(m.sample, length))
        ids = llm["tokens"].astype(np.int64)
        ids[np.array(m.kinds) == "video"] = family.video
        wanted.append(generated(ids[:length], 1.5, **family.arguments(m.media)))
    config = Config(model=ModelConfig(size="anyres-nano"))
    ours = Generator(config, folder, jax.devices()[:2], rows=len(prompts))
    said = ours.answers(prompts, Sampling(n, repetition_penalty=1.5))
    end = ours.tokenizer.im_end_id
    for answer, tokens in zip(said, wanted, strict=True):
        whole = [*answer.tokens, *[end] * (answer.stopped == "end")]
        assert whole == tokens[: len(whole)]
    assert len({token for tokens in wanted for token in tokens}) > 8  # else anything would do

    text = ["What is it?", "Why?"]
    Path("ask.jsonl").write_text("\n".join(json.dumps({"prompt": q}) for q in text))
    capsys.readouterr()
    more = ["--max-tokens", f"{n}", "--data.tokenizer", "bytes", "--json"]
    assert main(["generate", folder, "--prompts", "ask.jsonl", *more]) == 0
    answers = json.loads(capsys.readouterr().out)
    for question, answer in zip(text, answers, strict=True):
        prompt = prompt_sample(question, {}, config.data, MODEL, ours.tokenizer)
        tokens = generated(prompt.fields["llm"]["tokens"].astype(np.int64))
        whole = [*answer["tokens"], *[end] * (answer["stopped"] == "end")]
        assert whole == tokens[: len(whole)]


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


def changed(pair, rank, alpha):
    """What an adapter adds to a stack of matrices, or to one, flat: [*stack, in x out]."""
    a, b = np.asarray(pair["a"], np.float64), np.asarray(pair["b"], np.float64)
    stack = a.shape[: a.ndim - 2] if a.ndim == b.ndim == 2 else a.shape[:1]
    a, b = a.reshape(*stack, -1, rank), b.reshape(*stack, rank, -1)
    return alpha / rank * (a @ b)


@pytest.mark.slow
def test_adapters_are_folded_in_a_few_matrices_at_a_time(monkeypatch):
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
    with monkeypatch.context() as patch:
        alive = Alive(
            patch, (CheckpointReader, "read"), (Folder, "read"), (write, "to_file_layout")
        )
        assert main(["export", "runs/run", "--out", "out"]) == 0
    # Of all that is read and folded, no more at once than a few matrices of a layer.
    assert alive.peak <= 2 * alive.largest
    assert alive.largest < Path("out/model.safetensors").stat().st_size / 2 < alive.total
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
def test_what_adapters_do_not_hold_is_named(train, frozen, says):
    lora = replace(Config(), train=replace(Config().train, **train))
    model = configure_model(MODEL, lora.train)
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        check_only_adapters(lora, model, frozen)


@pytest.mark.parametrize(
    "before, says",
    [({"lora_rank": 0}, "began with what a trained"), ({"lora_rank": 2}, ""),
     ({"lora_rank": 2, "stage": "llm"}, "began with what a trained")],
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
