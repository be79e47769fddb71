"""The `dflop` command: every stage of a run alone, or all of it.

Exit codes: 0 done, 1 failed, 2 bad input (one line says what and how to mend it).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from dflop_jax.checkpoint.format import StorageError
from dflop_jax.cli import export as cli_export
from dflop_jax.cli import generate as cli_generate
from dflop_jax.cli import report as cli_report
from dflop_jax.cluster.launch import LaunchResult, launch
from dflop_jax.cluster.peers import RunFailed
from dflop_jax.config import Config, fields, override

Command = Callable[[argparse.Namespace], Any]


class _Parser(argparse.ArgumentParser):
    """Errors in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    args, extra = _parser().parse_known_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False, show_time=False)],
    )
    try:
        if extra:
            _reject(extra)
        result = args.run(args)
    except (ValueError, RunFailed, StorageError) as e:
        print(f"dflop {args.command}: {' '.join(str(e).split())}", file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    except KeyboardInterrupt:
        print(f"dflop {args.command}: interrupted", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(msgspec.to_builtins(result), indent=1))
    return result.exit_code if isinstance(result, LaunchResult) else 0


def _reject(extra: list[str]) -> None:
    """ValueError for what the parser does not know, with the nearest known name."""
    name = extra[0].split("=")[0]
    if name.startswith("--"):
        override(Config(), {name[2:]: ""})
    raise ValueError(f"unexpected argument {extra[0]!r}; see --help")


def load_experiment(path: str) -> Config:
    """The `config()` of an experiment file.

    Raises:
      ValueError: no such file, not Python, or no `config` function that returns a Config.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"{path}: no such experiment file; give a path such as experiments/demo.py"
        )
    sys.path[:0] = [p for p in (str(Path.cwd()),) if p not in sys.path]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as e:
        raise ValueError(f"{path}: {e}") from None
    try:
        config = module.config() if hasattr(module, "config") else None
    except (TypeError, ValueError) as e:  # an unknown field, a value out of range
        raise ValueError(f"{path}: config() fails: {e}") from None
    if not isinstance(config, Config):
        raise ValueError(f"{path}: defines no config() that returns a dflop_jax.Config")
    return config


def _config(args: argparse.Namespace, base: Config | None = None) -> Config:
    changed = {n: v for n, _, _ in fields() if (v := getattr(args, n)) is not None}
    return override(base or load_experiment(args.experiment), changed)


# ---- commands ----


def _profile(args: argparse.Namespace) -> Any:
    from dflop_jax.record_files import save
    from dflop_jax.records import ITEMS
    from dflop_jax.train import prepare

    config = _config(args)
    setup = prepare.set_up(config)
    profile = prepare.make_profile(setup, setup.source(), _ticker("profiling"))
    out = _run_dir(config) / "profile.json"
    save(profile, out)
    if not args.json:
        table = Table("module", "model", "items x tokens", "layer fwd ms", "bwd ms", "ends fwd ms")
        for t in profile.model.timings:
            row = (t.layer_forward_s, t.layer_backward_s, t.ends_forward_s)
            shape = f"{t.shape.items} x {t.shape.tokens}"
            table.add_row(t.module, str(t.model), shape, *(f"{1e3 * v:.2f}" for v in row))
        _show(table)
        units = {m: ITEMS[m] for m in profile.model.item_tokens} | {"llm": "LLM tokens"}
        loads = {unit: [s.load(m) for s in profile.data.shapes] for m, unit in units.items()}
        means = (f"{sum(n) / len(n):.1f} {u} on average (most {max(n)})" for u, n in loads.items())
        _show(
            f"{profile.data.n_total} samples of {profile.data.source}: {', '.join(means)}; "
            f"wrote {out}"
        )
    return profile.model


def _plan(args: argparse.Namespace) -> Any:
    from dflop_jax.cli import plan as cli_plan
    from dflop_jax.record_files import save
    from dflop_jax.train import planning, prepare

    config = _config(args)
    setup = prepare.set_up(config)
    profile = _given_profile(args) or prepare.make_profile(
        setup, setup.source(), _ticker("profiling")
    )
    shown = {"shown": planning.SHOWN} if args.explain else {}
    result = planning.make_plan(setup, profile, _ticker("planning"), **shown)
    helps = planning.what_would_help(setup, profile) if args.explain else []
    folder = _run_dir(config)
    save(profile, folder / "profile.json")
    save(result.plan, folder / "plan.json")
    if not args.json:
        _show(cli_plan.ranking(result, args.explain))
        if helps:
            _show(cli_plan.what_ifs(helps))
        _show(cli_plan.chosen(result))
        _show(f"wrote {folder / 'plan.json'}")
    return {"search": result, "what_if": helps} if args.explain else result


def _simulate(args: argparse.Namespace) -> Any:
    from dflop_jax.plan.evaluate import sample_batches
    from dflop_jax.plan.links import send_seconds, step_end_seconds
    from dflop_jax.profile.fit import CostModel
    from dflop_jax.record_files import load, save
    from dflop_jax.records import Plan
    from dflop_jax.report.run_folder import PLAN, PROFILE, SIMULATED
    from dflop_jax.report.timeline import Panel, draw_timeline, segment_modules
    from dflop_jax.report.trace import write_trace
    from dflop_jax.sim.predict import schedule_batches, simulate_scheduled
    from dflop_jax.train import planning, prepare

    config = _config(args)
    setup = prepare.set_up(config)
    profile = _given_profile(args) or prepare.make_profile(
        setup, setup.source(), _ticker("profiling")
    )
    if args.plan_file:
        plan = load(Plan, args.plan_file)
    else:
        plan = planning.make_plan(setup, profile, _ticker("planning")).plan
    batches = sample_batches(profile.data.shapes, config.train.global_batch, args.batches)
    schedules = schedule_batches(plan, batches, profile.model)
    trace = simulate_scheduled(
        plan,
        schedules,
        profile.model,
        collectives=step_end_seconds(plan, profile.model, setup.hardware),
        sends=send_seconds(plan, CostModel(profile.model), setup.hardware),
    )
    folder = _run_dir(config)
    used = [plan.buckets[group[0].bucket].name for s in schedules for group in s.groups]
    write_trace(folder / SIMULATED, [trace], dict(enumerate(used)))
    if not (folder / PLAN).exists():  # that of a run stays
        save(plan, folder / PLAN)
        save(profile, folder / PROFILE)
    names = tuple(m.name for m in plan.submeshes)
    panel = Panel(f"{plan.policy}, simulated", trace, segment_modules(plan), names)
    draw_timeline([panel], folder / "simulated.png")
    summary = {
        "makespan_s": trace.makespan_s,
        "step_s": trace.makespan_s / args.batches,
        "busy_fraction": trace.busy_fraction(),
    }
    if not args.json:
        busy = ", ".join(f"{k} {v:.0%}" for k, v in summary["busy_fraction"].items())
        _show(
            f"{args.batches} steps: {1e3 * trace.makespan_s / args.batches:.1f} ms a step, busy "
            f"{busy}; wrote {folder / 'simulated.png'} and {SIMULATED}"
        )
    return summary


def _train(args: argparse.Namespace) -> Any:
    from dflop_jax.cluster.distributed import leave, shutdown
    from dflop_jax.record_files import load
    from dflop_jax.records import Plan
    from dflop_jax.report.summary import summarise, summary_table
    from dflop_jax.train.trainer import Trainer

    if args.overwrite and args.resume:
        raise ValueError("--overwrite and --resume exclude each other; give one of them")
    plan = load(Plan, args.plan_file) if args.plan_file else None
    existing: Any = "overwrite" if args.overwrite else "resume" if args.resume else "error"
    trainer = Trainer(_config(args), plan=plan, profile=_given_profile(args), existing=existing)
    result = trainer.fit()
    trainer.peers.close()  # from here on a process that ends is no failure
    if not shutdown():
        leave(1)
    if not args.json and trainer.peers.is_hub and result.losses:
        _show(summary_table(summarise(result.run_dir)))
        _show(f"wrote {result.run_dir}: summary.md, timeline.png, loss.png, trace.json")
    return {
        "run_dir": str(result.run_dir),
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "steps_done": result.steps_done,
        "preempted": result.preempted,
        "evaluation": result.evaluation,
        "compiles_after_warmup": result.compiles_after_warmup,
    }


def _generate(args: argparse.Namespace) -> Any:
    return cli_generate.run(args, _config(args, cli_generate.base_config(args.experiment)))


def _launch(args: argparse.Namespace) -> LaunchResult:
    command = args.process[1:] if args.process[:1] == ["--"] else args.process
    return launch(command, args.n, devices_per_process=args.devices_per_process, pin=args.pin)


def _export(args: argparse.Namespace) -> Any:
    made = cli_export.run(args)
    if not args.json:
        _show(f"wrote step {made['step']} to {made['folder']}: {', '.join(made['files'])}")
    return made


# ---- helpers ----


def _show(what: Any) -> None:
    Console().print(what)


def _ticker(name: str) -> Callable[[int, int], None]:
    """Progress of a preparation as one rewritten line on a terminal."""
    console = Console(stderr=True)

    def tick(done: int, total: int) -> None:
        if console.is_terminal:
            console.print(f"{name} {done}/{total}", end="\r" if done < total else "\n")

    return tick


def _given_profile(args: argparse.Namespace) -> Any:
    from dflop_jax.record_files import load
    from dflop_jax.records import Profile

    return load(Profile, args.profile_file) if args.profile_file else None


def _run_dir(config: Config) -> Path:
    folder = Path(config.run_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; choose another --run_dir")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dflop",
        description="Data-aware training of multimodal LLMs on JAX device meshes.",
        epilog="To begin: dflop train experiments/demo.py; then dflop report runs/demo/dflop",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_argument("--verbose", action="store_true", help="log what happens underneath")
    experiment = _experiment_arguments()

    def add(name: str, run: Command, text: str, *parents: _Parser) -> Any:
        positional = "EXPERIMENT [--section.field VALUE ...]" if parents else "RUN [RUN ...]"
        sub = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            usage=f"dflop {name} {positional} [options]",
            parents=[common, *parents],
            allow_abbrev=False,
        )
        sub.set_defaults(run=run)
        return sub

    _launch_arguments(add("launch", _launch, "start local processes that train together"))
    add("profile", _profile, "measure the data's shapes and the model's times", experiment)
    plan = add("plan", _plan, "choose devices, parallelism and buckets for a policy", experiment)
    sim = add("simulate", _simulate, "run a plan on measured times, without training", experiment)
    train = add("train", _train, "profile and plan where needed, then train", experiment)
    cli_generate.add_arguments(
        add("generate", _generate, "show a trained model's answer to a prompt", experiment)
    )
    cli_export.add_arguments(add("export", _export, "write a run's weights for transformers"))
    plan.add_argument(
        "--explain", action="store_true", help="also show why others lost and what would help"
    )
    for sub in (plan, sim, train):
        sub.add_argument("--profile-file", metavar="JSON", help="use this profile")
    for sub in (sim, train):
        sub.add_argument("--plan-file", metavar="JSON", help="use this plan")
    sim.add_argument("--batches", type=int, default=4, help="global batches (default: 4)")
    train.add_argument("--overwrite", action="store_true", help="replace the run in the folder")
    train.add_argument(
        "--resume",
        choices=["auto"],
        help="continue the run in the folder from its newest whole checkpoint, if there is one",
    )
    report = add("report", cli_report.run, "show one run, or compare several in a table and a page")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the first is the base")
    report.add_argument(
        "--out",
        metavar="FILE",
        help="the page, FILE.html, and the picture of a comparison, FILE.png (default: "
        "report.html in the first run's folder, compare.png)",
    )
    return parser


def _launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dflop launch -n N [--devices-per-process D] [--pin] -- COMMAND [ARGUMENT ...]"
    parser.epilog = (
        "Example: dflop launch -n 2 -- dflop train experiments/demo.py. In COMMAND, dflop and "
        "python mean those of this interpreter. The first failure stops all processes and is the "
        "exit code; a signal is passed on, a second one kills."
    )
    parser.add_argument("-n", type=int, required=True, help="processes to start")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="D", help="default: plan.devices shared evenly"
    )
    parser.add_argument("--pin", action="store_true", help="give each process cores of its own")
    parser.add_argument("process", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def _experiment_arguments() -> _Parser:
    parser = _Parser(add_help=False)
    parser.add_argument("experiment", help="Python file whose config() returns a dflop_jax.Config")
    groups: dict[str, Any] = {}
    for name, kind, text in fields():
        section = name.split(".")[0] if "." in name else "run"
        if section not in groups:
            groups[section] = parser.add_argument_group(
                section, "Each replaces the experiment's value; defaults are for files without one."
            )
        default = Config()
        for part in name.split("."):
            default = getattr(default, part)
        shown = f" (default: {default})" if default not in ("", ()) else ""
        groups[section].add_argument(
            f"--{name}",
            dest=name,
            metavar=getattr(kind, "__name__", "list").upper(),
            help=(text + shown).replace("%", "%%"),
        )
    return parser
