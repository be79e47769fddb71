"""A run that goes on with the adapters of a folder begins where the run that wrote it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from dflop_jax import CheckpointConfig, ModelConfig
from dflop_jax.cli import main
from dflop_jax.cli.front_door import asked
from dflop_jax.cli.main import _parser
from dflop_jax.contract import edges_of
from dflop_jax.front.source import experiment_source
from dflop_jax.train.initial import beginning
from dflop_jax.train.trainer import Trainer
from dflop_jax.weights import write_folder
from tests.plans import NANO, nano_profile
from tests.train.test_published_run import MODEL, _here, config  # noqa: F401
from tests.weights.conftest import held, random_params

BATCH = 4


def fit(run):
    tied = tuple(m for m, module in MODEL.modules.items() if module.tied)
    plan = NANO.with_layout(edges=edges_of(MODEL), tied=tied)
    return Trainer(run, plan=plan, profile=nano_profile()).fit()


def ask(*words):
    named = ["train", "exp.py", "--data.tokenizer", "bytes", *words]
    return asked(_parser().parse_known_args(named)[0])


@pytest.mark.slow
def test_what_trains_beside_adapters_is_named_before_and_after(caplog, capsys):
    start = config()
    train = replace(
        start.train, steps=1, global_batch=BATCH, lora_rank=2, learning_rates=("connector=1e-3",)
    )
    fit(replace(start, model=ModelConfig(size="anyres-nano"), train=train))
    (said,) = [m for m in caplog.messages if "--adapter" in m]
    assert "--adapter will refuse this run: the run also trains connector" in said
    # What the checkpoint says counts, whatever the configuration is now.
    file = Path("runs/run/config.json")
    for text in (file.read_text(), file.read_text().replace("connector=1e-3", "lora=1e-3")):
        file.write_text(text)
        assert main(["export", "runs/run", "--out", "out", "--adapter"]) == 2
        assert "export: the run also trains connector" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.slow
def test_the_loss_goes_on_where_it_was(capsys):
    write_folder(
        "hf", MODEL.weights, held(jax.tree.map(lambda a: 0.05 * a, random_params(MODEL, 1)))
    )
    start = config()
    lora = replace(
        start.train, steps=3, global_batch=BATCH, lora_rank=2, lora_alpha=8.0, learning_rate=0.2,
        lora_targets=("llm", "connector"), lora_ranks=("llm.down=3",),
    )  # fmt: skip
    start = replace(start, data=replace(start.data, n_samples=BATCH))  # every step sees them all
    published = ModelConfig(size="anyres-nano", weights=("hf",))
    every = CheckpointConfig(every=2)
    before = fit(replace(start, model=published, train=lora, checkpoint=every))
    assert before.losses[2] < before.losses[0] - 0.005  # the adapters act
    shutil.rmtree("runs/run/checkpoints/00000003")
    assert main(["export", "runs/run", "--out", "out", "--adapter"]) == 0

    Path("exp.py").write_text(experiment_source(replace(start, run_dir="next"), (), "exp.py")[0])
    got = ask("--model", "out", "--train.steps", "1")
    after = got.config
    assert (after.model.weights, after.model.adapters) == (("hf",), "out")
    assert (after.train.lora_rank, after.train.lora_alpha) == (2, 8.0)
    assert after.train.lora_ranks == ("llm.down=3",)
    assert after.train.freeze == ()  # adapters train alone
    why = {s.name: s.why for s in got.settings}
    assert why["train.lora_rank"] == "r of adapter_config.json of --model"
    assert fit(after).losses[0] == pytest.approx(before.losses[2], rel=1e-5)
    beside = ask("--model", "hf", "--model.adapters", "out", "--train.steps", "1").config
    assert beside == after

    # Whatever does not fit is said before anything is measured.
    model = MODEL.with_lora(2, 8.0, targets=("llm",))
    with pytest.raises(
        ValueError, match=r"llm/adapter/down.* alone; give --train\.lora_rank 2 --train\.lo"
    ):
        beginning(model, after.model)
    form = json.loads(Path("out/adapter_config.json").read_text())
    for change, says in (
        ({"base_model_name_or_path": None}, "names no model of theirs; give it as --model"),
        ({"base_model_name_or_path": "gone"}, "--model out adapts gone: no such folder"),
        ({"peft_type": "IA3"}, "of the kind IA3 are not read; give LORA"),
    ):
        Path("out/adapter_config.json").write_text(json.dumps({**form, **change}))
        with pytest.raises(ValueError, match=says):
            ask("--model", "out")
