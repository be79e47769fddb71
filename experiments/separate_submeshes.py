"""Encoder and LLM on two named submeshes, the LLM as a loop of two stages, and what `auto` takes.

Command:  python experiments/separate_submeshes.py      (4 pretended devices in one process)
          dflop launch -n 2 -- python experiments/separate_submeshes.py      (2 on each of two)
Minutes:  2 to 3 on 2 cores (160 s of CPU, 170 on two processes), nothing cached; not timed alone
Expected: losses that differ by less than 1e-6 (4e-8 on 2026-11-30); the method that chose the
          buckets; steps whose assignment an integer program bounds; ticks and bubble of the loop;
          planned and measured steps

`plan.submeshes separate` puts the encoder on devices 0 and 1 (the submesh "vision") and the LLM on
devices 2 and 3 (the submesh "llm"); `plan.loop require` divides the LLM's layers into two stages of
one `shard_map` program, which passes hidden states on with `ppermute`. The encoder takes longer, so
that the LLM has time for the bubble. Both runs fit buckets by a search and by the integer program
in cvxpy, and train on the same batches from the same parameters. `dflop plan --explain` prints what
either structure costs for a model and data of your own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

# Flags of the plan, by run.
RUNS: dict[str, dict[str, Any]] = {
    "auto": {},
    "separate": {"submeshes": "separate", "loop": "require"},
}
WARMUP_STEPS = 3  # left out of the measured median


def config(name: str = "separate") -> Config:
    return Config(
        model=ModelConfig(size="tiny-deep+nano"),
        data=DataConfig(n_samples=2048),
        plan=PlanConfig(
            devices=4,
            max_model=1,
            max_stage=2,
            buckets=2,
            max_microbatches=16,
            effort="quick",
            **RUNS[name],
        ),
        train=TrainConfig(steps=12, global_batch=32, warmup_steps=3),
        run_dir=f"runs/separate_submeshes/{name}",
    )


def main() -> None:
    from dflop_jax import Trainer

    losses: dict[str, tuple[float, ...]] = {}
    profile = None  # measured by the first run; both have the same model and devices
    for name in RUNS:
        trainer = Trainer(config(name), profile=profile, existing="overwrite")
        losses[name] = trainer.fit().losses
        profile = trainer.profile
    if trainer.peers.is_primary:
        show(losses)


def show(losses: Mapping[str, tuple[float, ...]]) -> None:
    """Print a table of the runs, and by how much their losses differ."""
    from rich.console import Console
    from rich.table import Table

    from dflop_jax.report.run_folder import read_metrics, read_plan

    console = Console(width=120)
    names = "run, submeshes, buckets by, steps solved, ticks, bubble, planned ms, measured ms"
    table = Table(*names.split(", "))
    for name in RUNS:
        plan, steps = read_plan(config(name).run_dir), read_metrics(config(name).run_dir)
        layout = plan.layout
        ticks, bubbles = [], []
        for s in layout.segments:
            if (n_stages := layout.submesh(s.submesh).stage) > 1:
                ticks.append(n := s.ticks(n_stages, layout.group_size))
                bubbles.append((n_stages - 1) / n)
        table.add_row(
            name,
            ", ".join(f"{m.name} {m.text} on {[*m.devices]}" for m in layout.submeshes),
            plan.predicted.buckets_by,
            f"{sum(s['integer_bound_s'] > 0 for s in steps)} of {len(steps)}",
            ", ".join(map(str, ticks)) or "no loop",
            ", ".join(f"{b:.0%}" for b in bubbles) or "-",
            f"{1e3 * plan.predicted.makespan_s:.0f}",
            f"{1e3 * statistics.median(s['step_s'] for s in steps[WARMUP_STEPS:]):.0f}",
        )
    console.print(table)
    auto, separate = losses.values()
    difference = max(abs(a - b) / a for a, b in zip(auto, separate, strict=True))
    console.print(
        f"losses of a step differ by {difference:.1e} at most, the last is {auto[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
