"""Whole runs: part 3 of `benchmarks/gpu_lease.py`. They train with random weights on the built-in
scenes as `dflop train` does, in bfloat16 with float32 masters, under a plan that is carried along
(`plan_run`) or found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from dflop_jax import Callback, Trainer
from dflop_jax.aot.chip_profile import predict_profile
from dflop_jax.aot.compiling import Compiler, compile_plan
from dflop_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    PlanConfig,
    TrainConfig,
)
from dflop_jax.records import Plan, Profile
from dflop_jax.records.files import load, save
from dflop_jax.report.memory_growth import fit_growth
from dflop_jax.report.run_folder import read_metrics, read_plan
from dflop_jax.report.wall_time import read_wall_time
from dflop_jax.train.planning import make_plan
from dflop_jax.train.run_context import make_run_context, with_step_count
from dflop_jax.train.step_figures import predict_run

WARM = 3  # steps that are not counted
EXACT, EXACT_STEPS, STOP_AFTER = "exact", 8, 4
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A model, its toy size, the rank of its adapters (0: all of it trains), and steps."""

    factory: str
    size: str
    tiny: str
    lora_rank: int
    steps: int


RUNS = {
    "llava-ov-0.5b": Run("models.llava:build", "llava-ov-0.5b", "nano", 0, 12),
    "llava-ov-7b-adapters": Run("models.llava:build", "llava-ov-7b", "nano", 16, 10),
}


def config(run: Run, folder: Path, *, tiny: bool, chip: str = "") -> Config:
    dtype: Any = "float32" if tiny else "bfloat16"
    data = DataConfig(
        n_samples=512, max_tiles=9, max_frames=16, min_pixels=262_144, max_tokens=4096, workers=8
    )
    if tiny:
        data = replace(data, max_tiles=4, max_frames=4, min_pixels=1024, max_tokens=192, workers=1)
    return Config(
        model=ModelConfig(run.factory, run.tiny if tiny else run.size, dtype=dtype),
        data=data,
        plan=PlanConfig(devices=1, buckets=2, effort="quick", hardware=chip),
        train=TrainConfig(
            steps=run.steps, global_batch=8 if tiny else 32, learning_rate=1e-4, warmup_steps=2,
            lora_rank=run.lora_rank,
        ),
        checkpoint=CheckpointConfig(every_s=0),
        run_dir=str(folder / "run"),
        cache_dir=str(folder / "cache"),
    )  # fmt: skip


def carried(out: Path, name: str) -> tuple[Path, Path]:
    """Files of a run's plan and profile."""
    return out / f"{name}.plan.json", out / f"{name}.profile.json"


def plan_run(name: str, out: Path, chip: str, *, tiny: bool) -> Iterator[Row]:
    """Plan a run for a chip that is not here, leave plan and profile in `out`, compile it all."""
    with TemporaryDirectory(prefix="gpu_run-") as folder, closing(Compiler()) as compiler:
        settings = config(RUNS[name], Path(folder), tiny=tiny, chip=chip)
        settings = replace(settings, cache_dir=Config().cache_dir)  # of compiled prices
        context = make_run_context(settings)
        source = context.source()
        context = with_step_count(context, len(source))
        profile = predict_profile(context, source, lambda *_: None, lambda _: None)
        plan = make_plan(context, profile).plan
        for record, file in zip((plan, profile), carried(out, name), strict=True):
            save(record, file)
        report = compile_plan(context.config, plan, compiler)
        yield {
            "name": name, "plan": plan.policy, **_planned(plan),
            "predicted_mfu": predict_run(context, profile.data, plan).mfu,
            "compiled_bytes": max(m.peak_bytes for m in report.memory),
            "verdict": report.verdict, "programs": len(report.programs),
        }  # fmt: skip
        for error in (p.error for p in report.programs if p.error):
            yield {"name": f"{name} program", "error": error}


def _planned(plan: Plan) -> Row:
    layout, predicted = plan.layout, plan.predicted
    return {
        "buckets": [b.name for b in layout.buckets], "planned_s": predicted.makespan_s,
        "planned_bytes": max(predicted.peak_bytes.values()),
    }  # fmt: skip


def train_run(name: str, out: Path, *, tiny: bool) -> Iterator[Row]:
    """Train; `planned_s` is what plan.json says of a step, `measured_s` the mean of those after the
    third, whose batches differ in size; `over_schedule` is a step over its own schedule."""
    given: dict[str, Any] = {}
    plan_file, profile_file = carried(out, name)
    if plan_file.exists() and profile_file.exists():
        given = {"plan": load(Plan, plan_file), "profile": load(Profile, profile_file)}
    with TemporaryDirectory(prefix="gpu_run-") as folder:
        settings = config(RUNS[name], Path(folder), tiny=tiny)
        Trainer(settings, existing="overwrite", **given).fit()
        rows, plan = read_metrics(settings.run_dir), read_plan(settings.run_dir)
        spent = read_wall_time(settings.run_dir)
    assert spent is not None
    warm, last = rows[WARM:], rows[-1]
    memory = [r["memory"] or {} for r in rows]
    live = [m.get("live_bytes") or float("nan") for m in memory]
    growth = fit_growth([r["step"] for r in rows], live)
    measured_s = mean(r["step_s"] for r in warm)
    yield {
        "name": name, "carried": bool(given), "plan": plan.policy, **_planned(plan),
        "measured_s": measured_s, "steps_s": [r["step_s"] for r in rows],
        "over_schedule": median(r["step_s"] / r["makespan_s"] for r in warm),
        "tokens_per_s": median(r["tokens_per_s"] for r in warm),
        "mfu": median(r["mfu"] or 0.0 for r in warm),
        **{k: last[k] for k in ("mfu_by_module", "phase_s", "padding_fraction")},
        **{k: v for k, v in memory[-1].items() if k.startswith("peak_bytes")},
        "live_bytes": live, "slope": growth.bytes_per_step, "slope_error": growth.standard_error,
        "compiles": sum(r["compiles"] for r in rows[1:]), "losses": [r["loss"] for r in rows],
        "start_s": spent.wall_s - sum(r["step_s"] for r in rows), "spent_s": spent.seconds,
    }  # fmt: skip


def exact_run() -> Iterator[Row]:
    """A toy run in float32, and one that is stopped and resumed: losses are equal bit for bit."""

    class Stop(Callback):
        def after_step(self, done: Any) -> None:
            if done.step + 1 == STOP_AFTER:
                self.stop("as requested")

    losses = []
    with TemporaryDirectory(prefix="gpu_run-") as folder:
        run = replace(RUNS["llava-ov-0.5b"], steps=EXACT_STEPS)
        whole = config(run, Path(folder), tiny=True)
        whole = replace(whole, checkpoint=CheckpointConfig(every=EXACT_STEPS))
        Trainer(whole).fit()
        plan, profile = read_plan(whole.run_dir), load(Profile, Path(whole.run_dir, "profile.json"))
        parts = replace(whole, run_dir=str(Path(folder) / "parts"))
        Trainer(parts, plan=plan, profile=profile, callbacks=[Stop()]).fit()
        n_before = len(read_metrics(parts.run_dir))
        Trainer(parts, existing="resume").fit()
        losses = [[r["loss"] for r in read_metrics(c.run_dir)] for c in (whole, parts)]
    row = {"name": EXACT, "stopped_after": n_before, "losses": losses[0]}
    yield row if losses[0] == losses[1] else {**row, "error": f"resumed: {losses[1]}"}
