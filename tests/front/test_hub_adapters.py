"""Adapters by their name on the hub, of a model by its name, both in the cache. How they
get there is in `test_hub`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dflop_jax.cli import terminal
from dflop_jax.cli.front_door import asked
from dflop_jax.cli.main import _parser
from dflop_jax.cluster.ending import TryAgain
from dflop_jax.front import hub
from dflop_jax.weights import ModuleParams, write_folder
from models import qwen3_vl
from tests.cli.command_line import run
from tests.front.hub_server import NAME, SHA
from tests.front.made import llava_data, processor_files
from tests.front.wrong_lines import adapters_of
from tests.verify.test_verify import random_params

MODEL = "owner/model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, of a process that may not ask it."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "HELD_S", 1e6)
    folder = tmp_path / "hf" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def kept(cache, name, folder):
    """A folder as the cache has what it fetched by this name."""
    there = cache / f"models--{name.replace('/', '--')}"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text(SHA)
    return Path(shutil.move(folder, there / "snapshots" / SHA))


def model_here():
    """A small Qwen3-VL with weights, as transformers would write it."""
    config = processor_files(Path("config"))
    model = qwen3_vl.build(str(config))
    held = [ModuleParams(name, tree) for name, tree in random_params(model, 0).items()]
    write_folder("model", model.weights, held)
    return processor_files(Path("model"))


def front(*words):
    named = ["train", "--data", "photos/train.json", *words]
    return asked(_parser().parse_known_args(named)[0])


def test_adapters_and_their_model_from_the_cache(cache, capsys, monkeypatch):
    llava_data(Path("photos"), 4)
    adapters = adapters_of(processor_files(Path("config")), Path("a"), base=MODEL)
    adapters = kept(cache, NAME, adapters)
    # Its model is not in the cache: the remedy names the folder of the adapters that is.
    with pytest.raises(ValueError, match=MODEL) as refused:
        front("--model", NAME)
    line = str(refused.value)
    assert line.startswith(f"--model {NAME} adapts {MODEL}: no such folder, and the hub's cache")
    assert line.endswith(f"; give its model as --model FOLDER_OR_NAME --model.adapters {adapters}")

    def unreachable(name, tell):
        if name == NAME:
            return adapters
        raise TryAgain(f"--model {name}: the hub cannot be reached (why); run the command again")

    with monkeypatch.context() as patch:
        patch.setattr(hub, "model_folder", unreachable)
        with pytest.raises(TryAgain) as refused:
            front("--model", NAME)
    line, remedy = str(refused.value), line.partition("; ")[2]
    assert line.startswith(f"--model {NAME} adapts {MODEL}: the hub cannot be reached (why); run ")
    assert line.endswith(f"; run the command again, or {remedy}")
    model = kept(cache, MODEL, model_here())
    got = front("--model", NAME)
    assert got.config.model.weights == (str(model),)
    assert got.config.model.adapters == str(adapters)
    assert (got.config.train.lora_rank, got.config.train.lora_alpha) == (2, 4.0)
    by_remedy = front("--model", MODEL, "--model.adapters", str(adapters)).config
    assert replace(by_remedy, run_dir=got.config.run_dir) == got.config
    code, out, err = run(capsys, "check", "--model", NAME, "--json")
    assert code == 0, err
    assert str(adapters) in json.loads(out)["facts"]["weights"]


@pytest.mark.parametrize("name", ["a", NAME])
def test_adapters_in_a_pickle_alone(cache, monkeypatch, name):
    """Said before the model that they name is looked for."""
    Path("a").mkdir()
    Path("a/adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "x/y"}'
    )
    monkeypatch.setattr(hub, "_snapshot", lambda *_: Path("a"))
    with pytest.raises(ValueError, match=r"^a: no adapter_model.safetensors; .* pickle") as refused:
        front("--model", name)
    assert str(refused.value).endswith("save_pretrained(FOLDER, safe_serialization=True)")
