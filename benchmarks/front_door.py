"""One command with a model's name and a data file: does it train what transformers has?

Command:  python benchmarks/front_door.py [--families llava_onevision] [--json FILE]
Minutes:  about 5 a family on two cores
Expected: of each family the loss of step 1 is transformers' to 1e-4; the run is killed, resumed and
          exported; transformers' logits of what was exported are ours to 1e-5, and so are the
          tokens that it answers

A random folder of each family is written by transformers, tokenizer, template and picture processor
beside it, and a LLaVA-format folder with no, one and two pictures a record (of a text-only model
none). Then, as processes: `dflop train --model FOLDER --data FILE`, the same with `--resume auto`
and more steps, killed in the middle and begun again, `dflop export`, `dflop verify`,
`dflop generate`.
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
from tests.front.published import FAMILIES
from tests.front.reference import IMAGE, Reference

ROOT = Path(__file__).resolve().parent.parent
# As a tiny model needs them: without these a plan for two devices is searched for a minute more.
FLAGS = (
    "--plan.effort", "quick", "--plan.finalists", "1", "--plan.devices", "2",
    "--train.global_batch", "8", "--checkpoint.every", "2",
)  # fmt: skip


MORE_STEPS = 4  # of the run that is killed
ANSWER_TOKENS = 8


def command(*words: object, folder: Path, out: int = subprocess.PIPE) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "dflop_jax.cli", *map(str, words)],
        cwd=folder, env=environment, text=True, stdout=out, stderr=out,
    )  # fmt: skip


def killed(*words: object, folder: Path, run: Path) -> int:
    """Start a command and kill it once its run has made two steps more; the steps then there."""
    before = len(read_metrics(run))
    process = command(*words, folder=folder, out=subprocess.DEVNULL)
    while process.poll() is None and len(read_metrics(run)) < before + 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    return len(read_metrics(run))


def dflop(*words: object, folder: Path) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """A command as a process, the seconds until its first line that says the devices, and in
    all."""
    begun_s = time.perf_counter()
    process = command(*words, folder=folder)
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
      killed_at: steps that there were when the resumed run was killed.
      bit_identical, logit_error, not_compared: what `dflop verify` says of the export.
      exported_loss: of transformers with the exported weights, on the samples of step 1.
      same_tokens: whether the export answers as transformers does with it.
    """

    family: str
    told_s: float
    trained_s: float
    steps: int
    loss: float
    transformers_loss: float
    error: float
    killed_at: int
    resumed_steps: int
    same_folder: bool
    bit_identical: bool
    logit_error: float | None
    not_compared: str
    exported_loss: float
    tokens: int
    same_tokens: bool


def through(family: str, folder: Path) -> Door:
    """Train a random model of the family, kill, resume, export, verify and ask it, in an empty
    folder."""
    model = FAMILIES[family].write(folder / family)
    data = llava_data(folder / "photos", pictures=2 if FAMILIES[family].token else 0)
    ask = ("--model", model, "--data", data, *FLAGS)
    first, told_s, trained_s = dflop("train", *ask, "--json", folder=folder)
    answer = json.loads(first.stdout)
    run = folder / answer["run_dir"]
    metrics = read_metrics(run)
    print(first.stderr, file=sys.stderr)
    batch = first_batch(run, data, folder)
    loss, theirs = metrics[0]["loss"], Reference(model).loss(batch, data.parent)
    more = (*ask, "--train.steps", answer["steps_done"] + MORE_STEPS, "--resume", "auto")
    there = killed("train", *more, folder=folder, run=run)
    again, _, _ = dflop("train", *more, "--json", folder=folder)
    resumed = json.loads(again.stdout)
    out = folder / "out"
    dflop("export", run, "--out", out, folder=folder)
    verified, _, _ = dflop("verify", out, "--json", folder=folder)
    said, exported = json.loads(verified.stdout), Reference(out)
    picture = sorted(data.parent.glob("*.png"))[:1]
    question = " ".join([IMAGE] * len(picture) + ["What is it?"])
    spoken, _, _ = dflop(
        "generate", out, "--prompt", question, *(w for p in picture for w in ("--image", p)),
        "--max-tokens", ANSWER_TOKENS, "--json", folder=folder,
    )  # fmt: skip
    tokens = json.loads(spoken.stdout)["tokens"]
    return Door(
        family,
        told_s,
        trained_s,
        len(metrics),
        loss,
        theirs,
        abs(loss - theirs),
        there,
        resumed["steps_done"],
        resumed["run_dir"] == answer["run_dir"],
        said["bit_identical"],
        said["max_logit_error"],
        said["not_compared"],
        exported.loss(batch, data.parent),
        len(tokens),
        tokens == exported.greedy(question, picture, ANSWER_TOKENS),
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
