"""`dflop profile`: measure the data's shapes and the model's times."""

from __future__ import annotations

import argparse
from typing import Any

from dflop_jax.cli.derive_config import open_run_context
from dflop_jax.cli.experiment import OUT_FOLDER, finish_run, output_folder
from dflop_jax.cli.terminal import add_options, make_table, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, OUT_FOLDER)


def run(args: argparse.Namespace) -> Any:
    from dflop_jax.records.files import save
    from dflop_jax.report.run_folder import PROFILE

    context, profile = open_run_context(
        args, lambda context: output_folder(args, context.config, is_kept=False)
    )
    output_file = output_folder(args, context.config) / PROFILE
    save(profile, output_file)
    if not args.json:
        columns = ("layers of", "model", "rows x tokens", "layer fwd ms", "bwd ms", "ends fwd ms")
        rows = []
        for t in profile.model.timings:
            times = (t.layer_forward_s, t.layer_backward_s, t.ends_forward_s)
            shape = f"{t.shape.rows} x {t.shape.tokens}"
            rows.append([t.layers, str(t.model), shape, *(f"{1e3 * v:.2f}" for v in times)])
        show(make_table("", columns, rows))
        texts = []
        for m in profile.model.n_layers:
            tokens = [load.tokens(m) for load in profile.data.loads]
            mean = sum(tokens) / len(tokens)
            texts.append(f"{mean:.1f} tokens of {m} on average (maximum {max(tokens)})")
        if n := profile.model.n_timed:
            texts.append(f"{n} shapes of each module timed, others extrapolated")
        samples = f"{profile.data.n_total} samples of {profile.data.source}"
        show(f"{samples}: {', '.join(texts)}; wrote {output_file}")
    finish_run(context.peers)
    return profile.model
