"""Command lines of a careless user, each with what its one line has to say, and the folder
that they are given in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dflop_jax.weights import ModuleParams, write_folder
from models import qwen3_vl
from tests.cli.command_line import EXPERIMENT
from tests.front.made import llava_data, processor_files
from tests.verify.folders import random_params

ASK = "--model qwen --data photos/train.json"
# Command line -> part of what it says, the remedy if it has one.
WRONG = {
    # Misspelt, in every place.
    "trian nano.py": "invalid choice: 'trian'",
    "": "required: COMMAND",
    f"train {ASK} --dry-rn": "did you mean --dry-run?",
    "train --resume sometimes nano.py": "give auto, or the step of a checkpoint",
    "plan nano.py --explian": "did you mean --explain?",
    "compile nano.py --hardware h100": "did you mean --plan.hardware?",
    f"train {ASK} --lr 1e-4": "did you mean --train.learning_rate?",
    f"train {ASK} --train.batch_size 8": "did you mean train.global_batch?",
    # What is not there.
    "train --model qwen --data gone.json": "no such file or folder; check --data: records in",
    f"train --model bare {ASK[13:]}": "give --data.tokenizer FOLDER",
    f"train {ASK} --data.tokenizer gone": "leave data.tokenizer empty for byte-level",
    f"train {ASK} --data.root gone": "no such folder; give the folder of the media",
    f"train --model empty {ASK[13:]}": "name a folder of transformers",
    f"train --model cut {ASK[13:]}": "download",
    "init": "give one first",
    "generate gone": "no such run folder, folder of weights or experiment file",
    # Of the wrong kind.
    "train --model qwen --data qwen/config.json": "expected a JSON list of records",
    "train --model qwen --data photos/p1-0.png": "JSON list of records; give one, JSON lines",
    f"train --model clip {ASK[13:]}": "known: llava_onevision, internvl",
    f"train {ASK} --train.steps many": "got `str` - at `train.steps`; give a whole number",
    f"train {ASK} --train.steps 3 --train.epochs 1": "give one of them",
    f"train {ASK} --data.columns chat": "write FIELD=COLUMN, such as messages=chat",
    f"train {ASK} --train.learning_rates 3": "write NAME=RATE, such as vision=2e-6",
    "export qwen --out out": "qwen/config.json: not the configuration of a run; give a run folder",
    "check --data photos --page photos": "photos: is a folder; name a file in it",
    "train raises.py": "raises.py, line 2: ZeroDivisionError: division by zero; repair the file",
    # Impossible sizes.
    f"train {ASK} --train.eval_every 5": "give train.eval_samples or train.eval_fraction",
    f"train {ASK} --train.freeze vision,connector,llm": "leave one out of train.freeze",
    f"train {ASK} --plan.memory_bytes 1e4": "use more devices or more memory, or train less",
    f"train {ASK} --data.max_tokens 3": "raise it",
}


def careless_folder(folder: Path) -> Path:
    """Models, data and an experiment, good ones and others."""
    config = processor_files(folder / "config")
    model = qwen3_vl.build(str(config))
    held = [ModuleParams(name, tree) for name, tree in random_params(model, 0).items()]
    write_folder(folder / "qwen", model.weights, held)
    processor_files(folder / "qwen")
    shutil.copytree(folder / "qwen", folder / "cut")
    file = folder / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    llava_data(folder / "photos", 12)
    (folder / "nano.py").write_text(EXPERIMENT)
    for name, said in {
        "bare": {"model_type": "qwen3_vl"},
        "llama": {"model_type": "llama"},
        "clip": {"model_type": "clip", "vision_config": {"a": 1}},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(said))
    (folder / "empty").mkdir()
    (folder / "raises.py").write_text("def config():\n    return 1 / 0\n")
    return folder
