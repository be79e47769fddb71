"""Do two processes give the answers of one, and how many tokens come a second in batches?

Command:  python benchmarks/answers.py [--json FILE] [--steps N] [--samples N]
Minutes:  about 3 on two cores
Expected: `equal` is true: every answer of two processes is that of one; tokens a second of 16
          answers at once are several times those of one

A nano model is trained on the embedded scenes, on a plan of two devices that is given. `dflop
evaluate` then answers held-out scenes as one process and, under `dflop launch`, as two. Tokens a
second are those of answers of equal length after a first batch has compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.config import Config, DataConfig, ModelConfig
from dflop_jax.generate.generate import Generator
from dflop_jax.generate.prompt import NO_MEDIA, prompt_sample
from dflop_jax.generate.sampling import Sampling
from dflop_jax.record_files import save
from tests.plans import NANO, nano_profile

ROOT = Path(__file__).resolve().parent.parent
DFLOP = (sys.executable, "-m", "dflop_jax.cli")
EXPERIMENT = """
from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

def config():
    return Config(model=ModelConfig(size="nano"),
                  data=DataConfig(n_samples=512, max_tiles=2, max_frames=4, max_tokens=400),
                  plan=PlanConfig(policy="dflop", devices=2, max_model=1, buckets=2,
                                  sampled_batches=1, max_microbatches=4),
                  train=TrainConfig(steps=40, global_batch=8, learning_rate=3e-3),
                  checkpoint=CheckpointConfig(every=20), run_dir="run", cache_dir="cache")
"""
PROMPT = "What colour is the shape on the left?"


@dataclass(frozen=True)
class OnProcesses:
    """What `dflop evaluate` came to on some processes; `equal`: its answers are those of one."""

    processes: int
    samples: int
    exact: float
    distinct: int
    equal: bool


@dataclass(frozen=True)
class Speed:
    """Tokens of all answers a second, from the first token of each on."""

    batch: int
    tokens: int
    tokens_per_s: float


def dflop(folder: Path, *words: str) -> str:
    """What a command prints; ValueError: it fails."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*DFLOP, *words], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"dflop {' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def evaluations(folder: Path, steps: int, samples: int) -> Iterator[OnProcesses]:
    """Train in a folder, then evaluate by one process and by two."""
    (folder / "nano.py").write_text(EXPERIMENT)
    save(NANO, folder / "plan.json")
    save(nano_profile(), folder / "profile.json")
    files = ("--plan-file", "plan.json", "--profile-file", "profile.json")
    dflop(folder, "train", "nano.py", "--train.steps", str(steps), *files)
    alone: list[dict[str, object]] = []
    for processes in (1, 2):
        launch = () if processes == 1 else ("launch", "-n", "2", "--", *DFLOP)
        out = f"of{processes}"
        asked = ("--samples", str(samples), "--max-tokens", "24", "--batch", "4", "--out", out)
        dflop(folder, *launch, "evaluate", "run", *asked)
        lines = (folder / out / "answers.jsonl").read_text().splitlines()
        answers = [json.loads(line) for line in lines]
        alone = alone or answers
        facts = json.loads((folder / out / "evaluation.json").read_text())
        distinct = len({a["answer"] for a in answers})
        exact = facts["metrics"]["exact"]
        yield OnProcesses(processes, facts["samples"], exact, distinct, answers == alone)


def speed(folder: Path, batch: int, tokens: int) -> Speed:
    """Of the trained model, on one device."""
    config = Config(model=ModelConfig(size="nano"), data=DataConfig(max_tiles=2))
    generator = Generator(config, folder / "run", rows=batch)
    generator.tokenizer.im_end_id = -1  # so that all answers have equal lengths
    sample = prompt_sample(PROMPT, NO_MEDIA, config.data, generator.model, generator.tokenizer)
    how = Sampling(tokens)
    generator.answers([sample] * batch, how)
    times: list[float] = []
    generator.answers([sample] * batch, how, times=times)
    return Speed(batch, tokens, batch * (len(times) - 1) / (times[-1] - times[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_json(parser)
    parser.add_argument("--steps", type=int, default=40, help="of training (40)")
    parser.add_argument("--samples", type=int, default=32, help="questions (32)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer that is timed (64)")
    args = parser.parse_args()
    rows = Rows(args.json)
    with tempfile.TemporaryDirectory() as name:
        for row in evaluations(Path(name), args.steps, args.samples):
            rows.append(asdict(row))
        for batch in (1, 16):
            rows.append(asdict(speed(Path(name), batch, args.tokens)))
    table = Table("what", "came to")
    for row in rows:
        if "batch" in row:
            table.add_row(f"batches of {row['batch']}", f"{row['tokens_per_s']:,.0f} tokens/s")
        else:
            same = "equal to one's" if row["equal"] else "NOT equal to one's"
            came = f"{row['samples']} answers, exact {row['exact']:.3f}, {same}"
            table.add_row(f"{row['processes']} processes", came)
    Console().print(table)


if __name__ == "__main__":
    main()
