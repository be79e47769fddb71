"""One command with a model's name and a data file: does it train what transformers has?

Command:  python benchmarks/front_door.py [--families llava_onevision] [--json FILE]
Minutes:  about 5 a family on two cores
Expected: of each family the loss of step 1 is transformers' to 1e-4; the run is resumed and
          exported, and transformers' logits of what was exported are ours to 1e-5

A random folder of a Qwen3-VL, a LLaVA-OneVision and a Gemma 3 without pictures is written by
transformers, tokenizer, template and picture processor beside it, and a LLaVA-format folder with
no, one and two pictures a record (of a text-only model none). Then, as processes:
`dflop train --model FOLDER --data FILE`, the same with `--resume auto` and more steps,
`dflop export`, `dflop verify`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.config import Config
from dflop_jax.data import make_loader
from dflop_jax.report.run_folder import CONFIG, read_metrics
from dflop_jax.train.prepare import set_up
from tests.front.made import llava_data
from tests.front.published import FAMILIES, reference_loss

ROOT = Path(__file__).resolve().parent.parent
# As a tiny model needs them: without these a plan for two devices is searched for a minute more.
FLAGS = (
    "--plan.effort", "quick", "--plan.finalists", "1", "--plan.devices", "2",
    "--train.global_batch", "8", "--checkpoint.every", "2",
)  # fmt: skip


def dflop(*words: object, folder: Path) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """A command as a process, the seconds until its first line that says the devices, and in
    all."""
    begun_s = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dflop_jax.cli", *map(str, words)],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    lines, told_s = [], float("nan")
    assert process.stderr
    assert process.stdout
    for line in process.stderr:
        lines.append(line)
        if line.startswith("devices:"):
            told_s = time.perf_counter() - begun_s
    out = process.stdout.read()
    code = process.wait()
    done = subprocess.CompletedProcess([*map(str, words)], code, out, "".join(lines))
    if code:
        raise RuntimeError(f"dflop {' '.join(map(str, words))}: exit {code}\n{done.stderr}")
    return done, told_s, time.perf_counter() - begun_s


def first_batch(run: Path, data: Path, folder: Path) -> list[dict[str, Any]]:
    """The records of the first step of a run."""
    import msgspec

    config = msgspec.json.decode((run / CONFIG).read_bytes(), type=Config)
    os.chdir(folder)
    source = set_up(config).source()
    records = {r["id"]: r for r in json.loads(data.read_text())}
    names = [
        source.label(i).rpartition("[")[2].rstrip("]")
        for i in make_loader(config, source).indices(0)
    ]
    listed = list(records.values())
    return [listed[int(n)] for n in names]


@dataclass(frozen=True)
class Door:
    """What became of a family.

    Attributes:
      told_s: until the devices were said; `trained_s`: until the first run was over.
      error: of the loss of step 1.
      bit_identical, logit_error, not_compared: what `dflop verify` says of the export.
      exported_loss: of transformers with the exported weights, on the samples of step 1.
    """

    family: str
    told_s: float
    trained_s: float
    steps: int
    loss: float
    transformers_loss: float
    error: float
    resumed_steps: int
    same_folder: bool
    bit_identical: bool
    logit_error: float | None
    not_compared: str
    exported_loss: float


def through(family: str, folder: Path) -> Door:
    """Train a random model of the family, resume, export and verify, in an empty folder."""
    model = FAMILIES[family].write(folder / family)
    data = llava_data(folder / "photos", pictures=2 if FAMILIES[family].media else 0)
    ask = ("--model", model, "--data", data, *FLAGS)
    first, told_s, trained_s = dflop("train", *ask, "--json", folder=folder)
    answer = json.loads(first.stdout)
    run = folder / answer["run_dir"]
    metrics = read_metrics(run)
    print(first.stderr, file=sys.stderr)
    batch = first_batch(run, data, folder)
    loss, theirs = metrics[0]["loss"], reference_loss(model, batch, data.parent)
    more = ("--train.steps", answer["steps_done"] + 2)
    again, _, _ = dflop("train", *ask, *more, "--resume", "auto", "--json", folder=folder)
    resumed = json.loads(again.stdout)
    dflop("export", run, "--out", folder / "out", folder=folder)
    verified, _, _ = dflop("verify", folder / "out", "--json", folder=folder)
    said = json.loads(verified.stdout)
    return Door(
        family,
        told_s,
        trained_s,
        len(metrics),
        loss,
        theirs,
        abs(loss - theirs),
        resumed["steps_done"],
        resumed["run_dir"] == answer["run_dir"],
        said["bit_identical"],
        said["max_logit_error"],
        said["not_compared"],
        reference_loss(folder / "out", batch, data.parent),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--families", default=",".join(FAMILIES), help="with commas between; default: all"
    )
    add_json(parser)
    args = parser.parse_args(arguments)
    rows = Rows(args.json)
    for family in args.families.split(","):
        with tempfile.TemporaryDirectory(prefix="front.") as temporary:
            rows.append(through(family, Path(temporary)))
    table = Table("figure", *(row.family for row in rows))
    for name in list(asdict(rows[0]))[1:]:
        table.add_row(name, *(str(getattr(row, name)) for row in rows))
    Console().print(table)


if __name__ == "__main__":
    main()
