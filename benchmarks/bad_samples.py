"""A run over samples that hang, kill or fill their decoder, or lie: does it learn the same?

Command:  python benchmarks/bad_samples.py --json bad_samples.json
Minutes:  about 5 on two cores
Expected: equal losses in three runs; all 8 harmful samples named in each

Two processes train the nano model for 60 steps on 256 scenes, of which 8 hurt whoever decodes them:
two hang, two kill their process, two eat memory, two decode to another size than they promised.
The second run knows them as bad beforehand. The third is killed in the middle and started again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.config import DataConfig
from dflop_jax.data import ByteTokenizer, Limits, MediaSpec, Sample, SceneSource
from dflop_jax.data.sample import OpenedBy
from dflop_jax.records import Load

STEPS, SAMPLES = 60, 256
HARM = {5: "hang", 140: "hang", 33: "die", 201: "die", 64: "eat", 99: "eat", 17: "lie", 250: "lie"}
LIMIT_S = 1800.0  # no run takes longer, on any machine


class Harmful(SceneSource):
    """Scenes of which some hurt; `mode` "listed": they are known to be bad instead."""

    def __init__(self, config: DataConfig, spec: MediaSpec, split: str, mode: str) -> None:
        limits = Limits(config.max_tiles, config.max_frames, config.max_tokens, config.oversize)
        super().__init__(SAMPLES, config.seed, spec, ByteTokenizer(), limits, split=split)
        self._mode = mode
        arguments = {"config": asdict(config), "spec": asdict(spec), "split": split, "mode": mode}
        self.opened_by = OpenedBy("benchmarks.bad_samples:opened", arguments)

    def sample(self, index: int) -> Sample:
        harm = HARM.get(index, "")
        if harm and self._mode == "listed":
            raise ValueError(f"{self.label(index)}: listed as bad")
        if harm == "hang":
            time.sleep(LIMIT_S)
        elif harm == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif harm == "eat":
            try:
                np.ones(1 << 40, np.uint8)
            except MemoryError as e:
                raise ValueError(f"{self.label(index)}: eats memory") from e
        sample = super().sample(index)
        if harm == "lie":  # a token more than the load says
            return Sample({}, {}, Load({"llm": (sample.load.tokens("llm") + 1,)}))
        return sample


def opened(arguments: Mapping[str, Any]) -> Harmful:
    """The source in a decoding process."""
    config = msgspec.convert(arguments["config"], DataConfig)
    spec = msgspec.convert(arguments["spec"], MediaSpec)
    return Harmful(config, spec, arguments["split"], arguments["mode"])


def harmful(config: DataConfig, model: Any, split: str) -> Harmful:
    """As `data.factory`."""
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    return Harmful(config, spec, split, "harmful")


def listed(config: DataConfig, model: Any, split: str) -> Harmful:
    """As `data.factory`, all harm known."""
    spec = MediaSpec.of(model.preprocessing, model.piece_tokens)
    return Harmful(config, spec, split, "listed")


def main() -> None:
    # Here: processes that decode import this file as one of a package.
    from json_rows import Rows, add_json

    from tests.train.many import TWO, Jobs, losses

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=20.0, help="data.sample_timeout_s")
    add_json(parser)
    args = parser.parse_args()
    rows = Rows(args.json, lambda rows: {"harmful": len(HARM), "rows": rows})
    with tempfile.TemporaryDirectory() as made:
        jobs = Jobs.make(Path(made), TWO, steps=STEPS, every=10)
        for name, kind, kills in [("listed", "listed", 0), ("harmful", "harmful", 0),
                                  ("killed", "harmful", 1)]:  # fmt: skip
            more = ["--data.factory", f"benchmarks.bad_samples:{kind}",
                    "--data.sample_timeout_s", str(args.timeout)]  # fmt: skip
            folder, text, begin_s = Path(made) / name, "", time.monotonic()
            for last in [False] * kills + [True]:
                again = ["--resume", "auto"] if kills and last else []
                with jobs.started(2, folder, *more, *again) as job:
                    while not last and job.poll() is None and _steps(folder) < STEPS // 2:
                        time.sleep(0.2)
                    if not last:
                        job.send_signal(signal.SIGKILL)
                    try:
                        text += job.communicate(timeout=LIMIT_S)[0]
                    except subprocess.TimeoutExpired:
                        text += "took too long"
            flat = "".join(text.split())  # the log wraps its lines
            named = sum(f"train)[{index}]:" in flat for index in HARM)
            run = losses(folder) if _steps(folder) else []
            if len(run) != STEPS:
                print(text[-3000:])
            equal = run == (rows[0]["losses"] if rows else run)
            rows.append({"run": name, "steps": len(run), "named": named, "equal": equal,
                         "losses": run, "elapsed_s": time.monotonic() - begin_s})  # fmt: skip
    table = Table("run", "steps", "samples named", "last loss", "losses equal the first run's")
    for row in rows:
        last_loss = str(row["losses"][-1]) if row["losses"] else "-"
        table.add_row(*(str(row[k]) for k in ("run", "steps", "named")), last_loss,
                      str(row["equal"]))  # fmt: skip
    Console().print(table)


def _steps(folder: Path) -> int:
    """Rows of a run's metrics so far."""
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


if __name__ == "__main__":
    main()
