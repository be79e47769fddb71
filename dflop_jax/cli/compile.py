"""`dflop compile`: compile a plan's programs for an absent GPU.

It prints whether the plan fits into the chip's memory, and for each program: seconds to compile,
bytes of arguments and temporaries, executed over needed FLOPs, the fraction of matrix products'
FLOPs in float32, and bytes of collectives.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dflop_jax.cli.derive_config import (
    DerivedConfig,
    derive_config,
    open_run_context,
    settings_notes,
)
from dflop_jax.cli.experiment import PLAN_FILE, PROFILE_FILE, load_record
from dflop_jax.cli.terminal import Options, add_options, make_table, make_ticker, show
from dflop_jax.hardware import GIB
from dflop_jax.records import Plan

if TYPE_CHECKING:
    from dflop_jax.aot.reports import CompileReport, ProgramReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    out_option: Options = {"--out": ("JSON", "also write the report to this file")}
    add_options(parser, PROFILE_FILE | PLAN_FILE | out_option)


def run(args: argparse.Namespace) -> Any:
    import jax

    from dflop_jax.aot.chips import CHIPS, find_chip
    from dflop_jax.aot.compiling import Compiler, compile_plan
    from dflop_jax.records.files import save
    from dflop_jax.report.run_folder import check_answer_file

    jax.config.update("jax_platforms", "cpu")  # otherwise the GPU plugin needs a driver
    derived = derive_config(args)
    config = derived.config
    if not config.plan.hardware:
        raise ValueError(f"name the GPU: --plan.hardware {'|'.join(CHIPS)}")
    find_chip(config.plan.hardware)
    if args.out:
        check_answer_file(args.out)
        if not Path(args.out).resolve().parent.is_dir():
            raise ValueError(f"--out {args.out}: no such folder; make it first")
    with closing(Compiler()) as compiler:  # fails before planning if it is not installed
        plan = _choose_plan(args, derived)
        report = compile_plan(config, plan, compiler, make_ticker("compiling", "programs"))
    if args.out:
        save(report, args.out)
    if not args.json:
        show(_report_table(report))
        show(report.verdict)
    return report


def _choose_plan(args: argparse.Namespace, derived: DerivedConfig) -> Plan:
    from dflop_jax.train import planning

    if plan := load_record(args, Plan):
        settings_notes(derived).show()
        return plan
    check = (lambda context: None) if args.profile_file else planning.check_plannable
    context, profile = open_run_context(args, check)
    tick = make_ticker("planning", "placements", starts_shown=not args.profile_file)
    return planning.make_plan(context, profile, tick).plan


def _report_table(report: CompileReport) -> Table:
    nodes_text = f" on {report.n_nodes} nodes, each program for its whole submesh"
    title = f"{len(report.programs)} programs for {report.n_devices} x {report.chip}"
    title += nodes_text * (report.n_nodes > 1) + "; GiB per device"
    columns = ("program", "mesh", "s", "args", "temp", "done/\nneeded", "in\nfloat32", "sent")
    rows = ((p.name, "x".join(map(str, p.mesh)), *_program_figures(p)) for p in report.programs)
    return make_table(title, columns, rows)


def _program_figures(p: ProgramReport) -> list[str]:
    if p.error:
        return ["fails", *("-",) * 5]
    ratio, sent_bytes = p.executed_over_needed, sum(p.collectives.values())
    return [
        "equal" if p.same_as else f"{p.compile_s:.1f}",
        f"{p.argument_bytes / GIB:.2f}",
        f"{p.temp_bytes / GIB:.2f}",
        (f"{ratio:.2f}" if ratio else "-") + "?" * bool(p.unknown),
        f"{p.float32_dot_flops / p.flops:.0%}" if p.flops else "-",
        f"{sent_bytes / GIB:.2f}" if p.collectives else "-",
    ]
