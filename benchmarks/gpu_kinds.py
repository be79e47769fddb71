"""Models whose layers are of several kinds, whole, compiled for H100s that are not there.

Command:  python benchmarks/gpu_kinds.py [--json FILE] [--only TEXT ...] [--parts NAME ...]
Minutes:  about 20 on 2 cores; a row whose name has a TEXT is one or a few
Needs:    the extra gpu-compile
Expected: every program compiles, every plan fits, no program keeps an array of pairs of a row's
          tokens, and attention without a kernel is found to

`programs` has all programs of a model's plan: of `dflop`'s kind, tower and LLM on devices of their
own, or of `orch`'s, both on all devices under ZeRO 3; Qwen3.5 on 8 devices, Gemma 4 on 32. `kinds`
has one layer of each kind of the LLM between others, as the `dflop` plan splits it: the modelled
seconds of forward and backward by what takes them, and the needed FLOPs in that time over the peak.
`control` is the layer with attention by XLA, which has no kernel. Rows are one sample of 8,192
tokens, bfloat16, layers recomputed in backward. With --json the rows that the file has are not made
again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gpu_compile import Case, outcome
from gpu_measure import Line, predicted
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax.config import AttentionKernel, Config, ModelConfig, PlanConfig
from dflop_jax.contract import MultimodalModel, edges_of, layer_kinds_of
from dflop_jax.gpu_compile.child import CompileJob
from dflop_jax.gpu_compile.chips import absent_devices
from dflop_jax.gpu_compile.compiling import compile_plans
from dflop_jax.gpu_compile.hlo_arrays import pair_arrays
from dflop_jax.gpu_compile.needed import needed_flops, seen_pairs
from dflop_jax.gpu_compile.toolchain import compiler_environment
from dflop_jax.hardware import find_hardware
from dflop_jax.pipeline.lowering import Lowering
from dflop_jax.pipeline.segment import Segment
from dflop_jax.profile.shallow import shallow_segment
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Layout,
    MeshShape,
    Plan,
    Remat,
    SegmentPlan,
    Shape,
    Zero,
)
from dflop_jax.train.prepare import build_model

CHIP, TOKENS, CHILD = "h100", 8192, "--compiling"
REMAT: Remat = "layers"
PARTS = ("kinds", "control", "programs")
TERMS = ("products", "attention", "elementwise", "copies", "collectives", "launches")
GIB = 2**30


@dataclass(frozen=True)
class Degrees:
    """Of a plan's tower and LLM: first device, data and tensor ranks, and ZeRO degree."""

    tower: tuple[int, int, int, Zero]
    llm: tuple[int, int, int, Zero]


@dataclass(frozen=True)
class Studied:
    """A model, the query heads of its LLM, and its plans by policy."""

    factory: str
    size: str
    heads: int
    plans: Mapping[str, Degrees]


STUDIED = {
    "Qwen3.5-4B": Studied("models.qwen3_5:build", "qwen3.5-4b", 16, {
        "dflop": Degrees((0, 4, 1, 1), (4, 2, 2, 1)),
        "orch": Degrees((0, 8, 1, 3), (0, 4, 2, 3)),
    }),
    "Qwen3.5-9B": Studied("models.qwen3_5:build", "qwen3.5-9b", 16, {
        "dflop": Degrees((0, 4, 1, 1), (4, 1, 4, 1)),
        "orch": Degrees((0, 8, 1, 3), (0, 4, 2, 3)),
    }),
    "Gemma-4-31B": Studied("models.gemma4:build", "gemma4-31b", 32, {
        "dflop": Degrees((0, 8, 1, 1), (8, 6, 4, 3)),
        "orch": Degrees((0, 32, 1, 3), (0, 8, 4, 3)),
    }),
}  # fmt: skip
CONTROL = ("Qwen3.5-9B", "full")  # whose layer of this kind has no kernel there


def configuration(model: str, n_devices: int = 8, kernel: AttentionKernel = "auto") -> Config:
    m = STUDIED[model]
    return Config(
        model=ModelConfig(m.factory, m.size, dtype="bfloat16", attention_kernel=kernel),
        plan=PlanConfig(policy="dflop", hardware=CHIP, devices=n_devices),
        cache_dir="runs/cache",
    )


def the_plan(model: MultimodalModel, policy: str, degrees: Degrees) -> Plan:
    """Tower and LLM, each whole."""
    shares = dict(zip(model.modules, (degrees.tower, degrees.llm), strict=True))
    meshes, segments = [], []
    for name, (first, data, tensor, zero) in shares.items():
        meshes.append(MeshShape(data=data, model=tensor).block(name, first))
        layers = model.modules[name].n_layers
        segments.append(SegmentPlan(name, name, 0, layers, name, True, True, REMAT, zero))
    return Plan(
        policy,
        Layout(
            tuple(meshes),
            tuple(segments),
            (Bucket.of({name: Shape(1, TOKENS) for name in shares}),),
            edges=edges_of(model),
            tied=tuple(n for n, m in model.modules.items() if m.tied),
        ),
    )


# ---- whole plans ----


def program_rows(model: str, policy: str) -> Iterator[Line]:
    """A row for every program of a plan, and one for the plan."""
    plan = the_plan(build_model(configuration(model).model), policy, STUDIED[model].plans[policy])
    devices = plan.layout.n_devices
    job = CompileJob(configuration(model, devices), plan)

    def on_progress(done: int, known: int) -> None:
        print(f"{model} {policy}: {done} of {known} programs", file=sys.stderr, flush=True)

    (report,) = compile_plans([job], on_progress)
    # What a row says of a program is what `gpu_compile.py` says of it.
    named = Case(model, policy, STUDIED[model].plans[policy].llm[2], 1, "sm_90")
    found = outcome(named, report, plan, None)
    keys = ("program", "mesh", "compile_s", "temp_bytes", "modelled_s", "modelled_mfu",
            "executed_over_needed", "f32_dot_flops", "flops", "attention_gathers",
            "parameter_gathers", "pair_arrays", "error")  # fmt: skip
    for program in found["rows"]:
        yield {**{k: program[k] for k in keys}, "of": "program"}
    if isinstance(report, str):
        yield {"of": "plan", "devices": devices, "error": report}
        return
    peaks = {m.submesh: m.peak_bytes for m in report.memory}
    yield {"of": "plan", "devices": devices, "fits": report.fits, "verdict": report.verdict,
           "peak_bytes": peaks, "budget_bytes": report.budget_bytes, "error": ""}  # fmt: skip


# ---- one layer of each kind ----


def kind_rows(model: str, kind: str, kernel: AttentionKernel = "auto") -> Iterator[Line]:
    """A layer of a kind of the LLM between others, forward and backward."""
    config, hardware = configuration(model, kernel=kernel), find_hardware(CHIP)
    built = build_model(config.model)
    _, llm = built.modules
    tensor = STUDIED[model].plans["dflop"].llm[2]
    devices = absent_devices(CHIP, hardware, 8)[:tensor]
    segment = shallow_segment(
        built, llm, 1, devices, MeshShape(model=tensor), REMAT, ends=False, kind=kind
    )
    layers = layer_kinds_of(built.modules[llm]).count(kind)
    row: Line = {"of": "kind", "layers": layers, "tensor": tensor, "pair_arrays": [], "error": ""}
    ms = flops = 0.0
    for direction, text, figures in _compiled(segment):
        row |= {f"{direction}_{name}": value for name, value in figures.items()}
        row["pair_arrays"] += pair_arrays(text, TOKENS, STUDIED[model].heads // tensor)
        ms += figures["predicted_ms"]
        flops += figures["needed_flops"]
    row["modelled_mfu"] = 1e3 * flops / ms / hardware.bfloat16_flops
    yield row


def _compiled(segment: Segment) -> Iterator[tuple[str, str, Line]]:
    """(direction, optimized text, figures) of a segment's tasks."""
    lowering, shape = Lowering(segment), Shape(1, TOKENS)
    for direction in (FORWARD, BACKWARD):
        started = time.perf_counter()
        program = lowering.lower(shape, direction).compile()
        if direction == FORWARD:
            lowering.learn_residuals(shape, program)
        flops = needed_flops(segment, shape, direction, with_forward=False)
        seen = seen_pairs(segment.module, TOKENS)
        figures = predicted(program, find_hardware(CHIP), seen, flops)
        temp_bytes = getattr(program.memory_analysis(), "temp_size_in_bytes", 0)
        figures = {name: figures[name] for name in ("predicted_ms", "predicted")}
        figures |= {"needed_flops": flops, "compile_s": time.perf_counter() - started}
        yield direction, program.as_text() or "", figures | {"temp_bytes": temp_bytes}


# ---- all of it ----


Work = tuple[str, str, Callable[[], Iterator[Line]]]


def work() -> Iterator[Work]:
    """(part, name, what makes its rows) of all that there is to compile."""
    for model, m in STUDIED.items():
        config = configuration(model)
        _, llm = build_model(config.model).modules.values()
        for kind in dict.fromkeys(layer_kinds_of(llm)):
            yield "kinds", f"{model} {kind}", partial(kind_rows, model, kind)
        for policy in m.plans:
            yield "programs", f"{model} {policy}", partial(program_rows, model, policy)
    yield "control", "{} {} by XLA".format(*CONTROL), partial(kind_rows, *CONTROL, kernel="xla")


def problems(rows: Sequence[Line]) -> list[str]:
    """What is not as it should be, a line each."""
    found = []
    for r in rows:
        where = " ".join(filter(None, (r["name"], r.get("program", ""))))
        if r["error"]:
            found.append(f"{where}: {r['error']}")
        elif r["part"] == "control":
            if not r["pair_arrays"]:
                found.append(f"{where}: the search does not find the scores of dense attention")
        elif r.get("pair_arrays"):
            found.append(f"{where}: keeps pairs of tokens: {' '.join(r['pair_arrays'])}")
        elif not r.get("fits", True):
            found.append(f"{where}: {r['verdict']}")
    return found


def show(rows: Sequence[Line]) -> Iterator[Table]:
    programs = [r for r in rows if r["of"] == "program"]
    kinds = [r for r in rows if r["of"] == "kind"]
    plans = Table("plan", "programs", "arrays of pairs", "LLM backward: MFU", "temporaries GiB",
                  "peak GiB", "verdict", title="Plans on 8 or 32 H100s, compiled")  # fmt: skip
    for p in (r for r in rows if r["of"] == "plan"):
        own = [r for r in programs if r["name"] == p["name"]]
        tasks = [r for r in own if r["modelled_mfu"]]
        last = max(tasks, key=lambda r: r["modelled_s"], default={})
        plans.add_row(
            p["name"], str(len(own)), str(sum(len(r["pair_arrays"]) for r in own)),
            f"{last.get('modelled_mfu', 0):.1%}", f"{last.get('temp_bytes', 0) / GIB:.1f}",
            f"{max(p.get('peak_bytes', {}).values(), default=0) / GIB:.1f}",
            (p.get("verdict") or p["error"]).split(" (")[0],
        )  # fmt: skip
    layers = Table("layer", "of", "ms", "MFU", *TERMS, "arrays of pairs",
                   title=f"One layer of {TOKENS} tokens, forward and backward, ms")  # fmt: skip
    for r in kinds:
        both = [r[f"{d}_predicted"] for d in (FORWARD, BACKWARD)]
        total = sum(r[f"{d}_predicted_ms"] for d in (FORWARD, BACKWARD))
        terms = [f"{sum(b[t] for b in both):.2f}" for t in TERMS]
        layers.add_row(r["name"], str(r["layers"]), f"{total:.2f}", f"{r['modelled_mfu']:.1%}",
                       *terms, str(len(r["pair_arrays"])))  # fmt: skip
    yield from (plans, layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_json(parser)
    parser.add_argument("--only", nargs="+", default=[""], help="work whose name has such a text")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    every = list(work())
    for text in args.only:
        if not any(text in name for _, name, _ in every):
            parser.error(f"--only {text!r} is in no name; such as {every[0][1]!r}")
    if not args.compiling:
        try:
            environment = compiler_environment()
        except ValueError as e:
            parser.error(str(e))
        command = [sys.executable, __file__, *sys.argv[1:], CHILD]
        return subprocess.run(command, env=environment, check=False).returncode
    known: list[Line] = []
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text())["rows"]
    rows = Rows(args.json, as_rows, known)
    for part, name, make in every:
        wanted = part in args.parts and any(text in name for text in args.only)
        if wanted and (part, name) not in {(r["part"], r["name"]) for r in known}:
            for row in list(make()):
                rows.append({"part": part, "name": name, **row})
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in show(rows):
        console.print(table)
    found = problems(rows)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
