"""A model and data by name in the place of an experiment file: what they amount to, and what is
refused."""

import ast
import json
from pathlib import Path

import pytest

from dflop_jax.cli import train
from dflop_jax.cli.derive_config import derive_config
from dflop_jax.cli.main import _parser
from dflop_jax.config import Config
from dflop_jax.preflight.model_folder import FAMILIES
from dflop_jax.train.resume import Resume
from dflop_jax.train.run_context import build_model
from tests.cli.command_line import refused, run
from tests.front.made import HF_CONFIG, PIXELS, llava_data, processor_files


@pytest.fixture
def named():
    """A model's folder without weights, and data."""
    processor_files(Path("qwen"))
    llava_data(Path("photos"), 4)
    return ("--model", "qwen", "--data", "photos/train.json")


def ask(*words):
    return derive_config(_parser().parse_known_args(["train", *words])[0])


def test_what_a_run_goes_on_or_begins_with(named):
    def existing(*words):
        return train._existing_run_policy(_parser().parse_known_args(["train", *words])[0])

    assert existing() == "error"
    assert existing("--overwrite") == "overwrite"
    assert existing("--resume", "auto") == Resume()
    assert existing("--resume", "1200") == Resume(at=1200)
    assert existing("--resume", "auto", "--reset-optimizer") == Resume(reset_optimizer=True)
    both = ("--resume", "1200", "--reset-optimizer")
    assert existing(*both) == Resume(at=1200, reset_optimizer=True)
    for begun in ("runs/other", "runs/other@1200"):
        assert ask(*named, "--init-from", begun) == ask(*named, "--model.weights", begun)
        assert ask(*named, "--init-from", begun).config.model.weights == (begun,)


def test_a_folder_and_a_file_are_a_whole_configuration(named):
    got = ask(*named)
    config = got.config
    assert config.model.factory == FAMILIES["qwen3_vl"]
    assert (config.model.size, config.model.weights) == ("qwen", ("qwen",))
    assert (config.data.path, config.data.tokenizer) == ("photos/train.json", "qwen")
    assert (config.data.min_pixels, config.data.max_pixels) == PIXELS
    assert config.data.max_tokens == HF_CONFIG["text_config"]["max_position_embeddings"]
    assert (config.model.dtype, config.train.learning_rate) == ("float32", 1e-5)
    assert (config.train.epochs, config.train.warmup_ratio) == (1.0, 0.03)
    assert config.run_dir == "runs/qwen-train-{time}"
    assert all(s.origin for s in got.settings)
    assert build_model(config.model).vocab_size == HF_CONFIG["text_config"]["vocab_size"]


def test_what_the_user_gives_goes_before_all(named):
    got = ask(*named, "--train.steps", "7", "--train.lora_rank", "4", "--plan.hardware", "h100",
              "--data.tokenizer", "bytes", "--train.warmup_steps", "2")  # fmt: skip
    train = got.config.train
    assert (train.steps, train.epochs, train.warmup_steps, train.warmup_ratio) == (7, 0, 2, 0)
    assert (train.learning_rate, got.config.model.dtype) == (1e-4, "bfloat16")
    assert got.config.data.tokenizer == "bytes"
    said = {s.name for s in got.settings}
    assert not said & {"train.epochs", "train.warmup_ratio", "data.tokenizer"}
    assert ask(*named, "--plan.hardware", "cpu").config.model.dtype == "float32"
    file = ask("nano.py", *named).config  # which keeps what the names do not say
    assert (file.train.steps, file.run_dir, file.model.size) == (3, "run", "qwen")


def test_init_writes_what_the_command_line_amounts_to(named, capsys):
    code, out, err = run(capsys, "init", "mine.py", *named, "--train.steps", "7", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["file"] == "mine.py"
    ast.parse(Path("mine.py").read_text())
    assert ask("mine.py").config == ask(*named, "--train.steps", "7").config
    assert "# model_type of config.json" in Path("mine.py").read_text()
    assert "already exists" in refused(capsys, "init", "mine.py", *named)
    assert ask("nano.py").config != Config()


@pytest.mark.parametrize(
    "words, says",
    [
        ("train", "no model: give --model FOLDER_OR_NAME --data PATH_OR_NAME, or an experiment"),
        ("plan --model qwen", "no data: give --data PATH_OR_NAME"),
        ("train --model gone --data photos", "--model gone: no such folder, nor OWNER/NAME"),
        ("train --model photos --data photos", "config.json: no such file"),
        ("train --modle qwen --data photos", "unknown option --modle; did you mean --model?"),
        ("train --model qwen --dta photos", "unknown option --dta; did you mean --data?"),
        ("train --model qwen --data photos --distributed.hang_least_s 5", "hang_min_s?"),
        ("train --model qwen --data photos --data.path x", "--data and --data.path set the same"),
        ("plan photos", "is a folder, not an experiment file; give a model by --model, data by"),
        ("plan other", "a model's folder, not an experiment file; give it as --model other"),
        ("plan begun", "a run's folder, not an experiment file; dflop report begun shows the run;"),
        ("train --model begun --data photos", "begun: is a run's folder, not a published model; "),
        ("train --model qwen --data photos --train.epochs 0", "0 trains no step; give --train.st"),
        ("profile nano.py --data.path m.yaml --data.columns a=b", "give `columns` to the parts"),
        ("train --model bare --data photos", "bare: no tokenizer.json in it; give --data.tok"),
        ("train --model llama --data photos", "'llama' is only a language model"),
        ("train --model other --data photos", f"type is 'clip'; known: {', '.join(FAMILIES)}"),
        ("init --model qwen --data photos", "no file to write"),
        ("init mine.txt --model qwen --data photos", "give a name that ends in .py"),
        ("init gone/mine.py --model qwen --data photos", "gone: no such folder"),
    ],
)  # fmt: skip
def test_what_is_refused(named, capsys, words, says):
    Path("m.yaml").write_text("parts: [photos/train.json]")
    for name, config in {
        "bare": {"model_type": "qwen3_vl"},
        "llama": {"model_type": "llama"},
        "other": {"model_type": "clip", "vision_config": {"a": 1}},
        "begun": {"model": {}, "run_dir": "begun"},
    }.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
    Path("begun/metrics.jsonl").touch()
    assert says in refused(capsys, *words.split())
