"""`dflop generate`: stream a trained model's answer to a prompt, answer a file of prompts, or make
a clip."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop_jax.cli.experiment import folder_config, load_experiment, overrides
from dflop_jax.cli.terminal import Options, add_options, positive_int, print_note, show
from dflop_jax.config import Config, override

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop_jax.generate.generate import Generator
    from dflop_jax.generate.prompt_file import FileAnswer, FilePrompt
    from dflop_jax.generate.sampling import Sampling


# (default, help) of the fields of `generate.sampling.Sampling`, whose import would load jax.
_SAMPLING = {
    "max_tokens": (64, "maximum tokens of an answer"),
    "temperature": (0.0, "sampling temperature; 0: take the most likely token"),
    "top_p": (1.0, "sample from the most likely tokens with this total probability"),
    "top_k": (0, "sample from this number of most likely tokens; 0: from all"),
    "repetition_penalty": (1.0, "above 1: tokens of the prompt and answer become less likely"),
    "seed": (0, "seed of sampling"),
}
_NUMBERS = _SAMPLING | {
    "batch": (16, "number of prompts of a file answered at once"),
    "tp": (0, "tensor-parallel degree; 0: the smallest that fits into memory"),
    "flow_steps": (30, "number of Euler steps from noise to a clip"),
}
_OPTIONS: Options = {
    "--checkpoint": (
        "RUN",
        "run folder (its newest checkpoint) or a checkpoint's folder "
        "(default: the experiment's run_dir)",
    ),
    "--prompt": ("TEXT", "prompt to answer"),
    "--prompts": ("FILE", "file of prompts, in JSON lines"),
    "--out": ("FOLDER", "folder for the clip (default: RUN/generated)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: dflop generate runs/demo/dflop --image photo.jpg --prompt 'What colour is it?'. "
        'A file of prompts (--prompts) has a line {"prompt": TEXT, "image": [FILE]} for each '
        "prompt; the answers are lines of JSON in the same order. "
        "EXPERIMENT may also be a run folder, which has its configuration, or a folder of "
        "published weights. A text-to-video model writes its clip as a strip of frames (PNG) "
        "and as a GIF."
    )
    add_options(parser, _OPTIONS)
    repeated: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    for kind, noun in (("image", "pictures"), ("video", "clips"), ("audio", "sounds")):
        help_text = f"{noun} of the prompt, in the order of its <{kind}> tags"
        parser.add_argument(f"--{kind}", metavar="FILE", **repeated, help=help_text)
    parser.add_argument("--stop", metavar="TEXT", **repeated, help="end an answer before this text")
    for name, (default, text) in _NUMBERS.items():
        flag, help_text = f"--{name.replace('_', '-')}", f"{text} (default: {default})"
        number_type: Any = positive_int if name == "batch" else type(default)
        parser.add_argument(flag, type=number_type, default=default, metavar="N", help=help_text)
    help_text = "size of a clip's latents (default: that of the built-in clips)"
    latents = "TIME,ROWS,COLUMNS"
    parser.add_argument("--latents", type=_parse_latents, metavar=latents, help=help_text)


def run(args: argparse.Namespace) -> Any:
    """Answer the prompt or prompts. Text is streamed to stdout unless --json is given."""
    from dflop_jax.generate.clip import generates_clips
    from dflop_jax.generate.generate import Generator
    from dflop_jax.generate.prompt import add_tags, check_media
    from dflop_jax.generate.prompt_file import read_prompts
    from dflop_jax.generate.sampling import Sampling
    from dflop_jax.train.run_context import use_cache

    config, source = _resolve_config(args)
    if generates_clips(config):
        return _generate_clip(args, config, source)
    sampling = Sampling(**{name: vars(args)[name] for name in _SAMPLING}, stop=tuple(args.stop))
    media = {"image": args.image, "video": args.video, "audio": args.audio}
    prompts = None
    # Report mistakes before loading the model.
    if args.prompts is not None:
        if args.prompt is not None or any(media.values()):
            raise ValueError("--prompts: its lines have prompts and media; leave out other flags")
        prompts = read_prompts(args.prompts)
    elif args.prompt is None:
        raise ValueError("give --prompt TEXT, or --prompts FILE")
    else:
        add_tags(args.prompt, {kind: len(files) for kind, files in media.items()})
        check_media(media)
    use_cache(config.cache_dir)
    n_rows = 1 if prompts is None else min(args.batch, len(prompts))
    generator = Generator(config, source, rows=n_rows, tp=args.tp)
    if prompts is not None:
        return _answer_file(generator, prompts, sampling, args.json)
    assert args.prompt is not None
    answer = generator.answer(args.prompt, media, sampling, None if args.json else _write)
    if not args.json:
        _write("\n")
        if not answer.answer.strip():
            reason = f"its {len(answer.tokens)} tokens have no text"
            reason = reason if answer.tokens else "the model ended its turn at once"
            print_note(f"the answer is empty: {reason}")
    return answer


def _answer_file(
    generator: Generator, prompts: Sequence[FilePrompt], sampling: Sampling, as_json: bool
) -> list[FileAnswer]:
    """Return the answers to a file of prompts; prints a line for each unless --json is given."""
    from dflop_jax.generate.prompt_file import answer_prompts

    answers = []
    for answer in answer_prompts(generator, prompts, sampling):
        answers.append(answer)
        if not as_json:
            _write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
    if failed := [a.error for a in answers if a.error]:
        print_note(
            f"{len(failed)} of {len(answers)} prompts were not answered; the first: {failed[0]}"
        )
    return answers


def _resolve_config(args: argparse.Namespace) -> tuple[Config, str]:
    """Return the configuration of a command line and the folder of the parameters. ValueError if
    EXPERIMENT is not a file, a run folder or a folder of published weights."""
    from dflop_jax.distributed.devices import uses_cpu
    from dflop_jax.generate.generate import is_published
    from dflop_jax.preflight.derived_fields import with_settings
    from dflop_jax.preflight.model_folder import folder_settings

    folder = Path(args.experiment)
    if not folder.exists():
        raise ValueError(
            f"{folder}: no such run folder, folder of weights or experiment file; check the path, "
            "or train it first"
        )
    if not folder.is_dir():
        config = load_experiment(args.experiment)
    elif is_published(folder):
        config = with_settings(Config(), folder_settings(folder, overrides(args)))
        if not uses_cpu():
            config = replace(config, model=replace(config.model, dtype="bfloat16"))
    else:
        config = folder_config(folder, args)
    config = override(config, overrides(args))
    return config, args.checkpoint or (args.experiment if folder.is_dir() else config.run_dir)


def _generate_clip(args: argparse.Namespace, config: Config, source: str) -> Any:
    from dflop_jax.generate.clip import make_clip
    from dflop_jax.train.run_context import use_cache

    if args.image:
        raise ValueError("the model makes clips of a caption; leave out --image")
    if args.prompt is None:
        raise ValueError("the model makes a clip of one caption: give --prompt TEXT")
    run = args.experiment if Path(args.experiment).is_dir() else config.run_dir
    use_cache(config.cache_dir)
    folder = args.out or Path(run) / "generated"
    sizes = {"size": args.latents, "flow_steps": args.flow_steps}
    answer = make_clip(config, source, args.prompt, folder, **sizes, seed=args.seed)
    if not args.json:
        show(f"wrote {', '.join(answer.files)}")
    return answer


def _parse_latents(text: str) -> tuple[int, int, int]:
    numbers = [part.strip() for part in text.split(",")]
    if len(numbers) != 3 or not all(n.isdecimal() for n in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: write TIME,ROWS,COLUMNS, such as 4,6,6")
    time, rows, columns = map(int, numbers)
    return time, rows, columns


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
