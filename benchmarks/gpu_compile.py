"""Programs of published models compiled for GPUs that are not here.

Command:  python benchmarks/gpu_compile.py [--json FILE] [--quick] [--only TEXT ...]
Minutes:  about 90 on 2 cores; --quick, which predicts nothing, under 3
Needs:    the extra gpu-compile
Expected: every program compiles, or its plan is refused in one line; no float32 product above 1% of
          a program's FLOPs (3% where there are gated delta nets);
          bytes within 5% of the prediction by the median, 12% at worst

Every case is a model at full width and depth in bfloat16 under a plan of a policy's kind: `dflop`
has the modules on devices of their own, `orch` on the same devices, each with its own degrees, and
`blind` the encoder before the LLM with one (data, model) for both. LLMs have rows of 4,096 tokens,
encoders 8 tiles, 2 windows or a row of 8,192 patches; an LLM that edges enter between its layers
has segments in place of stages. Of equal programs of a model and a chip the first is compiled. With
--json the rows are kept after every case, and cases that the file has are not compiled again.

`predicted_bytes` are what the planner expects: of a backward what it takes beside its arguments, of
a forward what it hands over; and of every case the peak of each block of devices. Predictions come
from a few layers at other shapes (`dflop_jax.aot.chip_profile`, kept in runs/cache).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from json_rows import add_json, write_json
from rich.console import Console
from rich.table import Table

from dflop_jax.aot.chip_profile import compile_profile
from dflop_jax.aot.compiling import Compiler, compile_plan
from dflop_jax.aot.reports import CompileReport, ProgramReport
from dflop_jax.config import Config, ModelConfig, PlanConfig
from dflop_jax.contract import MultimodalModel, edges_of
from dflop_jax.hardware import find_hardware
from dflop_jax.plan.memory import peak_bytes
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Layout,
    Plan,
    Predicted,
    Remat,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    Zero,
)
from dflop_jax.simulate.task_graph import in_flight_limit
from dflop_jax.train.run_context import build_model

# Whose programs are compiled for the prediction, the small shape and the large one.
TOLD_TOKENS, TOLD_PIECES = (3072, 12288), (4, 16)
MEDIAN, WORST = 0.05, 0.12


@dataclass(frozen=True)
class CompileJob:
    """A plan to compile for the chip that its configuration names."""

    config: Config
    plan: Plan


def costs_of(job: CompileJob, degrees: Sequence[int]) -> CostModel:
    """What the planner knows of a case's model on its chip."""
    model, hardware = build_model(job.config.model), find_hardware(job.config.plan.hardware)
    alone = model.piece_tokens
    *encoders, last = model.modules
    shapes = {m: [Shape(n, alone[m]) for n in TOLD_PIECES] if m in alone else
              [Shape(1, n) for n in TOLD_TOKENS] for m in encoders}  # fmt: skip
    shapes[last] = [Shape(1, n) for n in TOLD_TOKENS]
    ticks = partial(print, "compiling for the prediction:", file=sys.stderr, flush=True)
    return CostModel(compile_profile(job.config, model, hardware, shapes, degrees, 8, ticks))


def with_peaks(job: CompileJob, costs: CostModel) -> CompileJob:
    """The job whose plan says what the planner expects of its peak memory; as it is where the model
    does not divide over its degrees, which compiling refuses."""
    try:
        peaks = peak_bytes(job.plan.layout, costs, in_flight_limit(job.plan))
    except ValueError:
        return job
    return replace(job, plan=replace(job.plan, predicted=Predicted(peak_bytes=peaks)))


def predicted_bytes(plan: Plan, program: ProgramReport, costs: CostModel) -> float | None:
    """What the planner expects of a program's bytes, and of which of them: see above."""
    if program.kind not in (FORWARD, BACKWARD):
        return None
    segment, mesh = plan.layout.segment(program.segment), plan.layout.submesh(program.submesh).shape
    (shape,) = plan.layout.shapes(segment.module)
    predictions = costs.predict(segment.module, mesh.model, shape.rows, shape.tokens)
    handed, taken = costs.segment(segment, mesh).task_bytes(
        plan.layout.group_size, predictions, trained=True, backward=True
    )
    return float(taken if program.kind == BACKWARD else handed) or None


def errors(outcomes: dict[str, dict[str, Any]], kind: str) -> dict[str, float]:
    """Of every prediction ("rows" or "peaks") how far it is off, by name; of equal programs of a
    model and a chip the first."""
    found = {}
    for name, case in outcomes.items():
        for r in case.get(kind, ()):
            if r["predicted_bytes"] and r["actual_bytes"] and not r.get("same_as"):
                what = r["program"] if kind == "rows" else r["submesh"]
                found[f"{name}: {what}"] = r["predicted_bytes"] / r["actual_bytes"] - 1
    return found


def accuracy(outcomes: dict[str, dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Lines about the predictions, and whether they are as good as expected."""
    for kind in ("rows", "peaks"):
        if off := errors(outcomes, kind):
            size = {name: abs(e) for name, e in off.items()}
            worst = max(size, key=size.__getitem__)
            median = statistics.median(size.values())
            words = "programs' bytes" if kind == "rows" else "peak bytes"
            yield (
                f"{words}, {len(off)} of shapes and depths not compiled for the prediction: off "
                f"by {median:.1%} (median), {off[worst]:+.1%} (worst: {worst})",
                median <= MEDIAN and size[worst] <= WORST,
            )


GIB = 2**30
MODELS = {
    "LLaVA-OneVision-0.5B": ("models.llava:build", "llava-ov-0.5b"),
    "LLaVA-OneVision-7B": ("models.llava:build", "llava-ov-7b"),
    "InternVL-2.5-4B": ("models.internvl:build", "internvl-2.5-4b"),
    "Qwen2-Audio-7B": ("models.qwen2_audio:build", "qwen2-audio-7b"),
    "Qwen3-VL-8B": ("models.qwen3_vl:build", "qwen3-vl-8b"),
    "Qwen3.5-4B": ("models.qwen3_5:build", "qwen3.5-4b"),
    "Qwen3.5-9B": ("models.qwen3_5:build", "qwen3.5-9b"),
}
POLICIES = ("dflop", "orch", "blind")
CHIPS = {"sm_80": "a100-80", "sm_90": "h100"}
TENSOR, STAGES = (1, 2, 4), (1, 2)
TOKENS, PIECES, PACKED = 4096, {"vision": 8, "audio": 2}, Shape(1, 8192)
QUICK = (
    ("LLaVA-OneVision-0.5B", "dflop", 2, 1, "sm_90"),
    ("LLaVA-OneVision-0.5B", "orch", 1, 1, "sm_80"),
)
MOST_FLOAT32 = 0.01
DELTA_FLOAT32 = 0.03  # of models with gated delta nets, whose states are float32
SAVES: dict[str, tuple[Remat, Zero]] = {
    "dflop": ("layers", 1),
    "orch": ("none", 3),
    "blind": ("dots", 2),
}


@dataclass(frozen=True)
class Case:
    """A model under a plan: the LLM's tensor and pipeline degrees, and the chip."""

    model: str
    policy: str
    tensor: int
    stages: int
    arch: str

    @property
    def name(self) -> str:
        """Short and unique."""
        return f"{self.model} {self.policy} tensor={self.tensor} stages={self.stages} {self.arch}"

    def job(self) -> CompileJob:
        """The plan and its configuration."""
        factory, size = MODELS[self.model]
        model = ModelConfig(factory=factory, size=size, dtype="bfloat16")
        plan = make_plan(build_model(model), self.policy, self.tensor, self.stages)
        chosen = PlanConfig(
            policy="dflop", hardware=CHIPS[self.arch], devices=plan.layout.n_devices
        )
        return CompileJob(Config(model=model, plan=chosen, cache_dir="runs/cache"), plan)


def make_plan(model: MultimodalModel, policy: str, tensor: int, stages: int) -> Plan:
    """A plan of a policy's kind for 8 devices; `dflop` takes 16 where half of them are too few."""
    *encoders, last = model.modules
    edges = edges_of(model)
    split = policy == "blind" or any(e.target == last and e.enters >= 0 for e in edges)
    parts, stages = (stages, 1) if split else (1, stages)
    half = max(4, parts * stages * tensor)
    first, block = (half, half // parts) if policy == "dflop" else (0, 8 // parts)
    shares = {"dflop": (half, 1), "orch": (8, 1), "blind": (block // tensor, tensor)}
    meshes = [SubmeshPlan(m, 0, 1, *shares[policy]) for m in encoders]
    saves = SAVES[policy]
    segments = [_segment(model, m, m, 0, model.modules[m].n_layers, saves) for m in encoders]
    layers = model.modules[last].n_layers
    for i in range(parts):
        name = f"{last}.{i}" if split else last
        data = block // stages // tensor
        meshes.append(SubmeshPlan(name, first + block * i, stages, data, tensor))
        start, stop = layers * i // parts, layers * (i + 1) // parts
        segments.append(_segment(model, name, last, start, stop, saves))
    alone = model.piece_tokens
    pieces = {m: Shape(PIECES[m], alone[m]) if m in alone else PACKED for m in encoders}
    return Plan(
        policy,
        Layout(
            tuple(meshes),
            tuple(segments),
            (Bucket.from_shapes({**pieces, last: Shape(1, TOKENS)}),),
            edges=edges,
            group_size=stages,
            tied=tuple(n for n, m in model.modules.items() if m.tied),
        ),
    )


def _segment(
    model: MultimodalModel,
    mesh: str,
    module: str,
    start: int,
    stop: int,
    saves: tuple[Remat, Zero],
) -> SegmentPlan:
    whole = model.modules[module].n_layers
    return SegmentPlan(mesh, module, start, stop, mesh, start == 0, stop == whole, *saves)


def _cases() -> tuple[Case, ...]:
    return tuple(
        Case(model, policy, tensor, stages, arch)
        for model in MODELS
        for arch in CHIPS
        for policy in POLICIES
        for stages in STAGES
        for tensor in TENSOR
    )


CASES = _cases()


def row(case: Case, program: ProgramReport, plan: Plan, costs: CostModel | None) -> dict[str, Any]:
    """What one program came to."""
    actual = program.work_bytes if program.kind == BACKWARD else program.handed_bytes
    return {
        "model": case.model,
        "program": program.name,
        "chip": case.arch,
        "mesh": "x".join(map(str, program.mesh)),
        "plan_policy": case.policy,
        "tensor": case.tensor,
        "stages": case.stages,
        "compile_s": program.compile_s,
        "same_as": program.same_as,
        "temp_bytes": program.temp_bytes,
        "actual_bytes": actual,
        "predicted_bytes": predicted_bytes(plan, program, costs)
        if costs and not program.error
        else None,
        "flops": program.flops,
        "executed_over_needed": program.executed_over_needed,
        "f32_dot_flops": program.float32_dot_flops,
        "pair_arrays": list(program.pair_arrays),
        "unknown": list(program.unknown),
        "error": program.error,
    }


def outcome(
    case: Case, answer: CompileReport | str, plan: Plan, costs: CostModel | None
) -> dict[str, Any]:
    """A case's rows and verdict, or why it is refused."""
    if isinstance(answer, str):
        return {"refused": answer, "rows": []}
    return {
        "refused": "",
        "fits": answer.fits,
        "verdict": answer.verdict,
        "rows": [row(case, p, plan, costs) for p in answer.programs],
        "peaks": [
            {"submesh": m.submesh, "actual_bytes": m.peak_bytes, "predicted_bytes": m.planned_bytes}
            for m in answer.memory
        ],
    }


def compile_cases(
    cases: Sequence[Case], *, predicts: bool = True
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Cases and their outcomes as they are known. A process compiles all cases of a model and a
    chip, so that equal programs are compiled once."""
    batches: dict[tuple[str, str], list[Case]] = {}
    for c in cases:
        batches.setdefault((c.model, c.arch), []).append(c)
    for batch in batches.values():
        jobs = [c.job() for c in batch]
        costs = costs_of(jobs[0], sorted({1, *(c.tensor for c in batch)})) if predicts else None
        if costs:
            jobs = [with_peaks(job, costs) for job in jobs]
        with closing(Compiler()) as compiler:
            for c, job in zip(batch, jobs, strict=True):
                answer: CompileReport | str
                try:
                    answer = compile_plan(job.config, job.plan, compiler)
                except ValueError as e:
                    answer = str(e)
                yield c, outcome(c, answer, job.plan, costs)


def problems(outcomes: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as it should be, a line each."""
    found = []
    for name, case in outcomes.items():
        for r in case["rows"]:
            where = f"{name}: {r['program']}"
            if r["error"]:
                found.append(f"{where}: {r['error']}")
            most = DELTA_FLOAT32 if name.startswith("Qwen3.5") else MOST_FLOAT32
            if r["f32_dot_flops"] > most * r["flops"]:
                share = r["f32_dot_flops"] / r["flops"]
                found.append(f"{where}: {share:.1%} of its products are in float32")
            if r.get("pair_arrays"):
                found.append(f"{where}: keeps pairs of tokens: {' '.join(r['pair_arrays'])}")
    return found


def show(outcomes: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Programs of published models, compiled for GPUs that are not here")
    table.add_column("model, policy, degrees, chip")
    numbers = "programs", "compile s", "most temp GiB", "done/needed", "float32"
    for name in numbers:
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for name, case in outcomes.items():
        rows = case["rows"]
        if not rows:
            table.add_row(name, *["-"] * 5, f"refused: {case['refused']}")
            continue
        ratios = [r["executed_over_needed"] for r in rows if r["executed_over_needed"]]
        flops = max(1.0, sum(r["flops"] for r in rows))
        table.add_row(
            name,
            f"{len(rows)} ({sum(not r['same_as'] for r in rows)} new)",
            f"{sum(r['compile_s'] for r in rows):.0f}",
            f"{max(r['temp_bytes'] for r in rows) / GIB:.1f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-",
            f"{sum(r['f32_dot_flops'] for r in rows) / flops:.1%}",
            case["verdict"].split(" (")[0],
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_json(parser)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has such a text")
    parser.add_argument("--quick", action="store_true", help="two small cases, no predictions")
    args = parser.parse_args()
    cases = [Case(*c) for c in QUICK] if args.quick else list(CASES)
    for text in args.only:
        if not any(text in c.name for c in cases):
            parser.error(f"--only {text!r} is in no name; such as {cases[0].name!r}")
    chosen = [c for c in cases if any(text in c.name for text in args.only)]
    jax.config.update("jax_platforms", "cpu")
    outcomes: dict[str, dict[str, Any]] = {}
    if args.json and args.json.exists():
        outcomes = json.loads(args.json.read_text())["cases"]
    left = [c for c in chosen if c.name not in outcomes]
    try:
        for i, (case, outcome_) in enumerate(compile_cases(left, predicts=not args.quick)):
            outcomes[case.name] = outcome_
            print(f"{i + 1}/{len(left)} {case.name}", file=sys.stderr, flush=True)
            rows = [r for outcome in outcomes.values() for r in outcome["rows"]]
            write_json(args.json, {"rows": rows, "cases": outcomes})
    except ValueError as e:
        parser.error(str(e))
    seen = {c.name: outcomes[c.name] for c in chosen}
    Console(width=None if sys.stdout.isatty() else 160).print(show(seen))
    found = problems(seen)
    for line in found:
        print(line)
    told = list(accuracy(seen))
    for line, _ in told:
        print(line)
    return 1 if found or not all(good for _, good in told) else 0


if __name__ == "__main__":
    sys.exit(main())
