"""`dflop plan`: choose devices, parallelism and buckets for a policy.

It prints the ranking and, with --explain, why other candidates lost and what would help.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dflop_jax.cli.derive_config import check_early, open_run_context
from dflop_jax.cli.experiment import OUT_FOLDER, PROFILE_FILE, finish_run, output_folder
from dflop_jax.cli.terminal import Options, add_options, make_table, make_ticker, show
from dflop_jax.hardware import GB, GIB
from dflop_jax.records import layer_key
from dflop_jax.report.number_format import duration, number, percent

if TYPE_CHECKING:
    from dflop_jax.config import PlanConfig
    from dflop_jax.plan.explain import KindCost, Saving
    from dflop_jax.plan.search import SearchResult
    from dflop_jax.plan.structures import StructureCost
    from dflop_jax.records import Hardware, Link
    from dflop_jax.train.planning import WhatIf
    from dflop_jax.train.step_figures import PredictedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain: Options = {"--explain": "also show why other plans lost and what would help"}
    add_options(parser, PROFILE_FILE | OUT_FOLDER | explain)


def run(args: argparse.Namespace) -> Any:
    """Write profile.json and plan.json, and show the ranking."""
    from dflop_jax.plan.explain import kind_costs
    from dflop_jax.records.files import save
    from dflop_jax.report.run_folder import PLAN, PROFILE
    from dflop_jax.train import planning
    from dflop_jax.train.run_context import trial_steps
    from dflop_jax.train.step_figures import predict_run

    context, profile = open_run_context(args, partial(check_early, args, None))
    config = context.config
    options = {"n_shown": planning.SHOWN_PLACEMENTS} if args.explain else {}
    options["max_alternatives"] = planning.max_alternatives(context, profile, first_step=0)
    tick = make_ticker("planning", "placements", starts_shown=not args.profile_file)
    result = planning.make_plan(context, profile, tick, **options)
    what_ifs, savings, structures = [], [], []
    if args.explain:
        tick = make_ticker("what would help", "searches")
        what_ifs = planning.evaluate_changes(context, profile, tick)
        savings = planning.explain_memory_savings(context, profile, result.plan)
        structures = planning.explain_structures(context, profile, result)
    kinds = kind_costs(profile)
    expected = predict_run(context, profile.data, result.plan)
    folder = output_folder(args, config)
    save(profile, folder / PROFILE)
    save(result.plan, folder / PLAN)
    if not args.json:
        show(ranking_table(result, args.explain))
        if args.explain:
            show(describe_limits(result.limits, config.plan))
            show(kind_table(kinds))
            show(structure_table(structures))
            for c in structures:
                if c.use is None:
                    show(f"{c.structure}: {c.reason}")
        if savings:
            show(memory_table(savings))
        if what_ifs:
            show(what_if_table(what_ifs))
        if links := profile.model.hardware and profile.model.hardware.measured:
            show(link_table(links))
        if profile.model.hardware and result.plan.layout.n_devices > 1:
            show(describe_overlap(profile.model.hardware))
        show(describe_choice(result))
        if result.alternatives:
            show(describe_alternatives(result, trial_steps(config)))
        show(describe_run(expected, result.plan.layout.modules[-1]))
        show(f"wrote {folder / PLAN}")
    finish_run(context.peers)
    search = search_json(result) | {"expected": expected}
    details = {"layers": kinds, "what_if": what_ifs, "memory_bought": savings}
    details["structures"] = structures
    return {"search": search, **details} if args.explain else search


def search_json(result: SearchResult) -> dict[str, object]:
    """Return a search's fields for `--json`, with only the figures of its candidates."""
    figures = (
        "policy",
        "name",
        "microbatches",
        "group_size",
        "saving",
        "makespan_s",
        "busy_s",
        "peak_bytes",
    )
    values: dict[str, object] = {f.name: getattr(result, f.name) for f in fields(result)}
    values["alternatives"] = [
        {"policy": p.policy, "makespan_s": p.predicted.makespan_s} for p in result.alternatives
    ]
    values["candidates"] = [{k: getattr(c, k) for k in figures} for c in result.candidates]
    return values


def ranking_table(result: SearchResult, explain: bool) -> Table:
    """Return a table of the best placements, simulated with one bucket each."""
    from dflop_jax.plan.explain import explain_slowdown

    title = (
        f"{result.n_evaluated} of {result.n_candidates} candidates simulated "
        f"({result.n_placements} placements; {result.n_fit} candidates fit into memory), each with "
        "one bucket"
    )
    columns = ["placement (stage x data x model @ device)", "micro-\nbatches", "a\ngroup"]
    columns += ["step ms", "GiB", *["saves memory by", "against the first"] * explain]
    rows = []
    for c in result.candidates:
        row = [f"{c.policy}: {c.name}", str(c.microbatches), str(c.group_size)]
        row += [f"{1e3 * c.makespan_s:.1f}", f"{c.peak_bytes / GIB:.2f}"]
        rows.append([*row, *[c.saving, explain_slowdown(c, result.candidates[0])] * explain])
    return make_table(title, columns, rows)


def structure_table(costs: Sequence[StructureCost]) -> Table:
    """Return a table of the best plan of each structure that has one."""
    rows, chosen_s = [], costs[0].step_s
    for c in costs:
        if c.use is None:
            continue
        over = f"{1e3 * c.extra_s:+.1f} ms, {c.extra_s / chosen_s:+.1%}"
        shares = f"{c.use.bubble:.1%}", f"{c.use.padding:.1%}", f"{1e3 * c.use.link_s:.1f}"
        rows.append((c.structure, c.plan, f"{1e3 * c.step_s:.1f}", over, *shares))
    title = (
        "Other structures: bubble and padding are shares of the devices' time, links what a step "
        "would save without them"
    )
    columns = ("best plan with", "placement", "step ms", "over the chosen", "bubble", "padding")
    return make_table(title, (*columns, "links ms"), rows)


def describe_choice(result: SearchResult) -> str:
    """Return a line with the plan, its buckets and its step time, also that with one bucket."""
    from dflop_jax.plan.memory import describe_savings
    from dflop_jax.plan.placement import layout_name
    from dflop_jax.report.summary import submesh_rows

    plan, layout, predicted = result.plan, result.plan.layout, result.plan.predicted
    rows = submesh_rows(layout)
    meshes = ", ".join(f"{name} {shape} on devices {devices}" for name, devices, shape, _ in rows)
    buckets = ", ".join(b.name for b in layout.buckets)
    buckets += f" (by {predicted.buckets_by})" * bool(predicted.buckets_by)
    if layout.fan_in > 1:
        buckets += f", up to {layout.fan_in} groups of {' and '.join(layout.divided)} for one"
    if layout.group_size > 1:
        buckets += f", groups of {layout.group_size} microbatches"
    for s in layout.segments:
        buckets += f", {s.name} in {s.rounds} rounds" * (s.rounds > 1)
        buckets += f", {s.name} unrolled" * s.unrolled
    if plan.scheduling.residuals:
        buckets += f"; groups store more residuals in free memory ({describe_savings(layout)})"
    ranked_key = plan.policy, layout_name(layout)
    one_s = [c.makespan_s for c in result.candidates if (c.policy, c.name) == ranked_key]
    return (
        f"{plan.policy}: {meshes}; buckets {buckets}: {1e3 * predicted.makespan_s:.1f} ms a step"
        + f" by {predicted.priced_by}" * bool(predicted.priced_by)
        + "".join(f" ({1e3 * s:.1f} ms with one bucket, as ranked)" for s in one_s[:1])
    )


def describe_alternatives(result: SearchResult, steps: int) -> str:
    """Return a line with the plans that a run would train some steps under, to choose one."""
    plans = (result.plan, *result.alternatives)
    texts = (f"{p.policy} {1e3 * p.predicted.makespan_s:.1f} ms" for p in plans)
    return f"dflop train runs {steps} steps under each of {', '.join(texts)}, to choose one"


def describe_run(run: PredictedRun, module: str) -> str:
    mfu = "" if run.mfu is None else f", MFU {percent(run.mfu)}"
    by_module = (f"{m} {percent(share)}" for m, share in run.mfu_by_module.items())
    mfu += f" ({', '.join(by_module)})" * (len(run.mfu_by_module) > 1)
    return (
        f"expected: {run.steps:,} steps in {duration(run.run_s)}, {number(run.tokens_per_s)} "
        f"tokens/s of {module}{mfu}"
    )


def link_table(links: Sequence[Link]) -> Table:
    texts = {
        (k.collective, k.across): f"{k.bandwidth / GB:.2f}, {1e3 * k.latency_s:.2f}" for k in links
    }
    names = dict.fromkeys(k.collective for k in links)
    rows = ((n, texts.get((n, False), "-"), texts.get((n, True), "-")) for n in names)
    title = "Measured links: GB/s per device, ms per ring step"
    return make_table(title, ("links", "in a node", "across nodes"), rows)


def describe_overlap(hardware: Hardware) -> str:
    texts = []
    for across, where in ((False, "inside a node"), (True, "across nodes")):
        measured = hardware.network_overlap if across else hardware.link_overlap
        source = "assumed" if measured is None else "measured"
        texts.append(f"{hardware.overlap(across=across):.2f} {where} ({source})")
    return f"share of ZeRO's gathers that computation can hide: {', '.join(texts)}"


def describe_limits(searched: Mapping[str, int], config: PlanConfig) -> str:
    """Return a line with the limits of the search, and whether the user or the job set each."""
    sources = {name: "given" if getattr(config, name) else "derived" for name in searched}
    limits = ", ".join(f"plan.{name} {n} ({sources[name]})" for name, n in searched.items())
    return (
        f"search limits: {limits}; {config.drift:.0%} of the simulated steps have another mix of "
        "media than the data (plan.drift)"
    )


def kind_table(rows: Sequence[KindCost]) -> Table:
    texts = (
        (
            layer_key(c.module, c.kind),
            str(c.layers),
            f"{c.shape.rows} x {c.shape.tokens}",
            f"{1e3 * c.forward_s:.2f}",
            f"{1e3 * c.backward_s:.2f}",
            f"{c.share:.0%}",
        )
        for c in rows
    )
    columns = ("layers", "number", "rows x tokens", "forward ms", "backward ms", "share")
    return make_table("Times of layers, by kind", columns, texts)


def memory_table(rows: Sequence[Saving]) -> Table:
    texts = (
        (
            s.module,
            s.chosen,
            s.cheaper if s.fits else f"{s.cheaper} (does not fit)",
            f"{s.saved_bytes / GIB:.2f}",
            f"{1e3 * s.extra_step_s:.1f}",
        )
        for s in rows
    )
    columns = ("module", "saves memory by", "instead of", "GiB less", "ms a step")
    return make_table("Time paid for saved memory", columns, texts)


def what_if_table(changes: Sequence[WhatIf]) -> Table:
    current_s, rows = changes[0].makespan_s, []
    for w in changes:
        if w.makespan_s is None or current_s is None:
            rows.append((w.change, "-", "nothing fits"))
        else:
            rows.append((w.change, f"{1e3 * w.makespan_s:.1f}", f"{current_s / w.makespan_s:.2f}"))
    columns = ("change", "step ms", "times as fast")
    return make_table("What would help (one bucket each)", columns, rows)
