"""`dflop profile`: measure the data's shapes and the model's times."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from dflop_jax.cli.experiment import experiment_config, run_folder
from dflop_jax.cli.terminal import show, ticker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A profile takes the experiment's arguments alone."""


def run(args: argparse.Namespace) -> Any:
    """Write profile.json; shows a table of times and what a sample holds on average."""
    from dflop_jax.record_files import save
    from dflop_jax.records import ITEMS
    from dflop_jax.train import prepare

    config = experiment_config(args)
    setup = prepare.set_up(config)
    profile = prepare.make_profile(setup, setup.source(), ticker("profiling"))
    out = run_folder(config) / "profile.json"
    save(profile, out)
    if not args.json:
        table = Table("module", "model", "items x tokens", "layer fwd ms", "bwd ms", "ends fwd ms")
        for t in profile.model.timings:
            row = (t.layer_forward_s, t.layer_backward_s, t.ends_forward_s)
            shape = f"{t.shape.items} x {t.shape.tokens}"
            table.add_row(t.module, str(t.model), shape, *(f"{1e3 * v:.2f}" for v in row))
        show(table)
        units = {m: ITEMS[m] for m in profile.model.item_tokens} | {"llm": "LLM tokens"}
        loads = {unit: [s.load(m) for s in profile.data.shapes] for m, unit in units.items()}
        means = (f"{sum(n) / len(n):.1f} {u} on average (most {max(n)})" for u, n in loads.items())
        show(
            f"{profile.data.n_total} samples of {profile.data.source}: {', '.join(means)}; "
            f"wrote {out}"
        )
    return profile.model
