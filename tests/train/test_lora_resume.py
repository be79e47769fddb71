"""A run with LoRA that was killed and resumed is the run that was not."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from dflop_jax.cli import main

from ..report.test_tensorboard import events_of
from . import resume_cases
from .resume_cases import CONFIG, NANO_MODEL, STEPS, fit

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")


@pytest.mark.slow
def test_a_killed_run_resumes_as_the_whole(tmp_path_factory):
    pytest.importorskip("tensorboardX")
    train = dataclasses.replace(
        CONFIG.train, lora_rank=2, lora_dropout=0.2, freeze=("vision", "connector"),
        learning_rates=("lora=1e-2",), tensorboard=True,
    )  # fmt: skip
    whole = tmp_path_factory.mktemp("lora") / "run"
    fit(whole, train=train, model=NANO_MODEL)
    killed = resume_cases.as_killed(whole, saved=6, rows=8)
    fit(killed, "resume", train=train, model=NANO_MODEL)
    resume_cases.assert_as_whole(killed, whole)
    scalars, of_whole = events_of(killed), events_of(whole)
    for name in ("loss", "learning_rates/lora", "held_out/loss"):
        assert scalars[name] == of_whole[name]
    assert list(scalars["loss"]) == list(range(STEPS))
    assert list(scalars["held_out/loss"]) == [3, 7, 11]
    # The rank is a shape of the checkpoint, and a run without LoRA trains something else.
    other = shutil.copytree(whole, "other")
    more = dataclasses.replace(train, steps=14, lora_rank=3)
    said = resume_cases.refused(other, train=more, model=NANO_MODEL)
    assert "adapter" in said
    assert "another model" in said
    said = resume_cases.refused(
        other, train=dataclasses.replace(CONFIG.train, steps=14), model=NANO_MODEL
    )
    assert "connector, llm, vision frozen" in said
    # The adapters alone, of what is published alone.
    assert main(["export", str(whole), "--out", "alone", "--adapter", "--module", "llm"]) == 0
    about = json.loads(Path("alone/adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["rank_pattern"]) == (2, train.lora_alpha, {})
    assert "model.layers.1.self_attn.o_proj" in about["target_modules"]
