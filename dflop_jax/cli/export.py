"""`dflop export`: write a run's checkpoint as a folder that transformers or diffusers loads."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop_jax.cli.experiment import FACTORY, folder_config
from dflop_jax.cli.terminal import Options, add_options, show
from dflop_jax.config_fields import dtype_name
from dflop_jax.folders import make_folder

if TYPE_CHECKING:
    from dflop_jax.checkpoint.store import CheckpointReader


_OPTIONS: Options = {
    "--module": ("NAME", "export one module only, such as llm or generator"),
    "--ema": "export the moving average of the parameters (train.ema)",
    "--adapter": "export only the adapters, as peft reads them beside the base model",
    f"--{FACTORY}": (
        "MODULE:FUNCTION",
        "function that builds the model; required if the run's own factory is not below models.",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Adapters (LoRA) are folded into the weights; with --adapter only they are written. If the "
        "run began with weights of the whole model (model.weights), the export has that folder's "
        "names, types and tokenizer files."
    )
    parser.usage = "dflop export RUN --out FOLDER [--dtype NAME] [options]"
    parser.add_argument("run_folder", metavar="RUN", help="run folder (its newest checkpoint)")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder to make")
    dtype_help = "float32, bfloat16 or float16 (default: that of the initial weights)"
    parser.add_argument("--dtype", type=dtype_name, help=dtype_help)
    add_options(parser, _OPTIONS)
    weights_help = "new folder of the run's initial weights (model.weights), if they were moved"
    parser.add_argument("--weights", metavar="FOLDER", nargs="+", help=weights_help)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from dflop_jax.train import load_params
    from dflop_jax.train.resume import frozen_parts
    from dflop_jax.train.run_context import build_trained_model
    from dflop_jax.weights import Folder, write_adapter, write_folder

    if Path(args.out).exists():
        raise ValueError(f"{args.out}: already exists; choose another --out or remove it")
    make_folder(Path(args.out).parent, "choose another --out")
    if not Path(args.run_folder).is_dir():
        raise ValueError(
            f"{args.run_folder}: no such run folder; check the path, or train it first"
        )
    config = folder_config(args.run_folder, args)
    if args.weights:
        config = replace(config, model=replace(config.model, weights=tuple(args.weights)))
    model: Any = build_trained_model(config)
    module = args.module or ""
    weight_map = load_params.find_weight_map(model, module)
    initial_folder = load_params.find_published_folders(config.model.weights).get(module, "")

    def write(reader: CheckpointReader, folder: Path) -> int:
        if args.adapter:
            load_params.check_only_adapters(config, model, frozen_parts(reader.run_state))
            write_adapter(
                args.out,
                weight_map,
                load_params.open_params(reader, model, average=args.ema),
                rank=config.train.lora_rank,
                alpha=config.train.lora_alpha,
                dropout=config.train.lora_dropout,
                base=initial_folder,
                dtype=args.dtype or "float32",
            )
        else:
            merged = load_params.read_merged_params(reader, model, average=args.ema)
            source = Folder(initial_folder, weight_map) if initial_folder else None
            extra_files = [] if args.module else load_params.find_tokenizer_folders(config)
            write_folder(
                args.out,
                weight_map,
                merged,
                source=source,
                dtype=args.dtype,
                processor_folders=extra_files,
            )
        return reader.step

    step = load_params.use_newest_checkpoint(args.run_folder, write)
    files = sorted(f.name for f in Path(args.out).iterdir())
    if not args.json:
        show(f"wrote step {step} to {args.out}: {', '.join(files)}")
    return {"folder": args.out, "step": step, "files": files}
