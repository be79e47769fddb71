"""Folders that a run writes while it trains: what they hold, and when they are written again."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

from dflop_jax import CheckpointConfig, Config, ModelConfig
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cli import main
from dflop_jax.contract import edges_of
from dflop_jax.data.sample import Places, Sample
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.prompt import prompt_sample
from dflop_jax.generate.sampling import Sampling
from dflop_jax.records import Load
from dflop_jax.train import exports as exports_module
from dflop_jax.train.exports import (
    PASSED_OVER,
    Exports,
    beside,
    check_only_adapters,
    warn_of_adapters,
)
from dflop_jax.train.lazy_params import saved_params
from dflop_jax.train.load_params import load_params
from dflop_jax.train.stages import adapted
from dflop_jax.train.trainer import Trainer
from dflop_jax.verify import reference
from dflop_jax.verify.samples import mixed_samples
from dflop_jax.weights import write_folder
from models import llava
from tests.plans import NANO, nano_profile
from tests.processes import CACHE
from tests.train.many import Jobs
from tests.train.test_published_run import _here, config, on_host  # noqa: F401
from tests.weights.conftest import held, random_params

MODEL = llava.build("anyres-nano")


class Saver:
    """A checkpointer that has saved some steps."""

    def __init__(self, *steps):
        self.saved, self.held, self.is_busy = list(steps), (), False

    def steps(self):
        return tuple(sorted(self.saved, reverse=True))

    def folder_of(self, step):
        return Path(f"checkpoints/{step:08d}")

    def hold(self, steps):
        self.held = tuple(steps)


class Writing:
    """Stands for the writing of a folder; fails at some steps."""

    def __init__(self, *bad):
        self.made, self.bad = [], bad

    def __call__(self, checkpoint, out):
        step = int(checkpoint.name)
        if step in self.bad:
            raise OSError("disk full")
        self.made.append(step)
        out.mkdir(parents=True)


def exports(saver, export, every=10, is_first=True):
    return Exports(Path("run/exports"), every, saver, export, is_first=is_first)


def test_what_is_due_is_written_once_in_turn():
    saver, export = Saver(), Writing()
    out = exports(saver, export)
    out.begin_at(0, ())
    for step in range(1, 31):
        if out.is_due(step):
            saver.saved.append(step)
            out.want(step)
        out.look()
    out.want(30)
    assert 30 in saver.held
    out.finish()
    assert export.made == [10, 20, 30]
    assert (saver.held, out.trouble) == ((), "")


def test_a_checkpoint_that_is_on_its_way_is_waited_for():
    saver, export = Saver(), Writing()
    out = exports(saver, export)
    saver.is_busy = True
    out.want(10)
    out.look()
    assert (saver.held, export.made) == ((10,), [])
    saver.is_busy = False
    saver.saved.append(10)
    out.finish()
    assert export.made == [10]


def test_a_save_that_failed_is_not_exported():
    out = exports(saver := Saver(5), export := Writing())
    out.want(10)
    out.finish()
    assert (export.made, saver.held) == ([], ())


def test_a_resume_writes_what_is_missing_and_nothing_twice():
    Path("run/exports/00000010").mkdir(parents=True)
    Path("run/exports/00000020.partial").mkdir()
    Path("run/exports/00000040").mkdir()
    out = exports(saver := Saver(10, 20, 25, 30), export := Writing())
    out.begin_at(30, saver.steps())
    out.finish()
    assert export.made == [20, 30]
    assert Path(f"run/exports/00000040.{PASSED_OVER}").is_dir()  # of steps that are run again
    saver.saved.append(40)
    out.want(40)
    out.finish()
    assert export.made == [20, 30, 40]
    assert not Path(f"run/exports/00000040.{PASSED_OVER}").exists()


def test_trouble_is_said_and_the_next_one_comes(caplog):
    out = exports(Saver(10, 20), export := Writing(10))
    out.want(10)
    out.finish()
    assert out.trouble == "disk full"
    assert "no export after step 10: disk full" in caplog.text
    out.want(20)
    out.finish()
    assert (export.made, out.trouble) == ([20], "")


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_average_is_exported_where_the_run_keeps_one(monkeypatch, ema):
    asked = config(checkpoint=CheckpointConfig(export_every=10))
    asked = replace(asked, run_dir="run", train=replace(asked.train, ema=ema))
    made = []
    monkeypatch.setattr(
        exports_module, "export_checkpoint", lambda folder, out, **more: made.append((out, more))
    )
    out = Exports.of(asked, MODEL, Saver(10), is_first=True)
    out.want(10)
    out.finish()
    ((folder, more),) = made
    assert folder == Path("run/exports/00000010")
    assert more["average"] is bool(ema)


def test_other_processes_and_runs_without_write_nothing():
    for out in (exports(Saver(10), Writing(), is_first=False), exports(Saver(10), Writing(), 0)):
        out.begin_at(10, (10,))
        out.want(10)
        out.finish()
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_run_exports_what_it_saved(compiled_once, capsys, monkeypatch):
    params = jax.tree.map(lambda a: 0.05 * a, random_params(MODEL, 1))
    write_folder("hf", MODEL.weights, held(params), dtype="bfloat16")
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    about = {"size": {"height": 32, "width": 32}, **halves}
    Path("hf/preprocessor_config.json").write_text(json.dumps(about))
    Path("hf/tokenizer.json").write_text("{}")
    tied = tuple(m for m, module in MODEL.modules.items() if module.tied)
    plan = NANO.with_layout(edges=edges_of(MODEL), tied=tied)
    asked = config(
        model=ModelConfig(size="anyres-nano", weights=("hf",)),
        checkpoint=CheckpointConfig(every=0, keep=1, export_every=2),
    )
    asked = replace(asked, train=replace(asked.train, steps=3))
    made = []
    whole = exports_module.export_checkpoint

    def counted(folder, out, **more):
        made.append(int(folder.name))
        whole(folder, out, **more)

    monkeypatch.setattr(exports_module, "export_checkpoint", counted)

    def fit(existing):
        made.clear()
        Trainer(asked, plan=plan, profile=nano_profile(), existing=existing).fit()
        return list(made)

    assert fit("error") == [2, 3]
    folders = sorted(p.name for p in Path("runs/run/exports").iterdir())
    assert folders == ["00000002", "00000003"]
    # As the command does it from the same checkpoint, bit for bit.
    assert main(["export", "runs/run", "--out", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    for file in Path("out").iterdir():
        assert file.read_bytes() == Path("runs/run/exports/00000003", file.name).read_bytes()
    assert Path("out/preprocessor_config.json").is_file()
    assert main(["export", "runs/run", "--out", "exact", "--dtype", "fp32"]) == 0
    if not reference.missing():
        check_answers("exact", capsys)
    after = on_host("runs/run/exports/00000002")
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after, on_host("out"))
    assert 0 < max(jax.tree.leaves(moved)) < 0.05
    # A resume of what is done writes nothing; an interrupted one is written again.
    assert fit("resume") == []
    shutil.move("runs/run/exports/00000003", "runs/run/exports/00000003.partial")
    assert fit("resume") == [3]
    for file in Path("out").iterdir():
        assert file.read_bytes() == Path("runs/run/exports/00000003", file.name).read_bytes()
    # Rows of a stack are read alone.
    store = CheckpointStore(Path("runs/run/checkpoints"))
    loaded = load_params("runs/run", MODEL, jax.devices()[0]).params
    for name, tree in saved_params(store.open(3), MODEL).items():
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), tree, loaded[name]
        )
        for leaf, known in zip(*map(jax.tree.leaves, (tree["layers"], loaded[name]["layers"]))):
            assert (leaf.shape, leaf.dtype) == (known.shape, known.dtype)
            np.testing.assert_array_equal(leaf[1], known[1])


PUBLISHED = """
def config():
    from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, TrainConfig
    return Config(
        model=ModelConfig(size="anyres-nano"),
        data=DataConfig(n_samples=32, max_tiles=2, max_frames=2, max_tokens=512, workers=1),
        train=TrainConfig(steps=5, global_batch=4),
        checkpoint=CheckpointConfig(every=0, keep=1, export_every=2),
        cache_dir={cache!r},
    )
"""


@pytest.mark.slow
def test_two_processes_write_every_folder_once(tmp_path):
    """Each has one module's shards; process 0 alone reads them all back and writes."""
    plan = NANO.with_layout(
        edges=edges_of(MODEL), tied=tuple(m for m, module in MODEL.modules.items() if module.tied)
    )
    jobs = Jobs.make(tmp_path, plan)
    (tmp_path / "small.py").write_text(PUBLISHED.format(cache=str(CACHE)))
    code, output = jobs.run(2, tmp_path / "run")
    assert code == 0, output
    assert "no export" not in output
    made = tmp_path / "run" / "exports"
    assert sorted(p.name for p in made.iterdir()) == ["00000002", "00000004", "00000005"]
    # The newest is what the command writes of the run's checkpoint; the others are of earlier ones.
    assert main(["export", str(tmp_path / "run"), "--out", "out"]) == 0
    for file in Path("out").iterdir():
        assert file.read_bytes() == (made / "00000005" / file.name).read_bytes()
    weights = [(folder / "model.safetensors").read_bytes() for folder in sorted(made.iterdir())]
    assert len(set(weights)) == 3
    assert {len(w) for w in weights} == {len(weights[0])}


def up_to(sample, n):
    """The first `n` tokens of a sample, whose media all stand among them."""
    llm = {k: a[:n] for k, a in sample.fields["llm"].items()}
    places = {pair: Places(p.index[:n], p.weight) for pair, p in sample.places.items()}
    return Sample(sample.fields | {"llm": llm}, places, Load(sample.load.pieces | {"llm": (n,)}))


def check_answers(folder, capsys):
    """Greedy answers of a folder in batches, by the library and the commands, are those that
    transformers generates from it, token by token."""
    n, mixed = 12, mixed_samples(MODEL)
    theirs = reference._loaded(Path(folder), "LlavaOnevisionForConditionalGeneration")
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


def test_a_model_without_a_published_form_is_refused():
    asked = config(model=ModelConfig(factory="tests.small:build"),
                   checkpoint=CheckpointConfig(export_every=2))  # fmt: skip
    with pytest.raises(ValueError, match=r"export_every=2.*no published form.*--module"):
        Trainer(asked)


ADAPTERS = MODEL.with_lora(2, 4.0, targets=("llm",))


@pytest.mark.parametrize(
    "train, frozen, says",
    [
        ({"lora_rank": 2}, None, ""),
        ({"lora_rank": 2, "learning_rates": ("lora=1e-3",)}, None, ""),
        ({"lora_rank": 2, "learning_rates": ("connector=1e-3",)}, None, "also trains connector"),
        ({"lora_rank": 2, "stage": "connector", "lora_targets": ("connector",)}, None, ""),
        # A checkpoint says itself what was frozen.
        ({"lora_rank": 2}, ("llm", "vision"), "also trains connector, which adapters do not hold"),
        ({"lora_rank": 2, "learning_rates": ("connector=1e-3",)},
         ("llm", "vision", "connector"), ""),
    ],
)  # fmt: skip
def test_what_adapters_do_not_hold_is_named(train, frozen, says):
    lora = replace(Config(), train=replace(Config().train, **train))
    model = adapted(MODEL, lora.train)
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        check_only_adapters(lora, model, frozen)


def test_a_run_without_adapters_has_none_to_export(caplog):
    warn_of_adapters(Config(), MODEL)
    assert not caplog.records
    with pytest.raises(ValueError, match=r"has no adapters; train with train\.lora_rank"):
        check_only_adapters(Config(), MODEL)


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


def test_adapters_that_no_published_matrix_has_are_named_before_training(caplog):
    class Fewer:
        """Publishes no matrix of the decoder's layers."""

        def __getattr__(self, name):
            return getattr(ADAPTERS, name)

        weights = replace(
            ADAPTERS.weights, tensors=[t for t in ADAPTERS.weights.tensors if t.layer is None]
        )

    lora = replace(Config(), train=replace(Config().train, lora_rank=2))
    warn_of_adapters(lora, ADAPTERS)
    assert not caplog.records
    warn_of_adapters(lora, Fewer())
    (said,) = caplog.messages
    assert "will refuse this run: a published checkpoint has no matrix for" in said


def test_files_beside_come_from_the_data_s_tokenizer_first():
    for name in ("tok", "llm", "tower"):
        Path(name).mkdir()
    start = config(model=ModelConfig(weights=("vision=tower", "llm=llm")))
    asked = replace(start, data=replace(start.data, tokenizer="tok"))
    assert beside(asked) == [Path("tok"), Path("llm"), Path("tower")]
    assert beside(config()) == []
