"""`dflop generate`: the answer of a trained model, shown as it comes, or its clip."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop_jax.cli.answering import add_sampling, add_ways, answering_config, sampling_of
from dflop_jax.cli.terminal import show
from dflop_jax.config import Config

if TYPE_CHECKING:
    from dflop_jax.generate.generate import ChatAnswer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: dflop generate runs/demo/dflop --image photo.jpg --prompt 'What colour is it?'. "
        "EXPERIMENT may be a run folder, which knows what it was trained with, or a folder of "
        "published weights; a model of text to video writes its clip as a strip of frames (PNG) "
        "and as a GIF."
    )
    parser.add_argument(
        "--checkpoint",
        metavar="RUN",
        help="run folder, for its newest checkpoint, or one of its checkpoints (default: the "
        "experiment's run_dir)",
    )
    for kind, word in (("image", "pictures"), ("video", "clips"), ("audio", "sounds")):
        parser.add_argument(
            f"--{kind}",
            metavar="FILE",
            nargs="+",
            action="extend",
            default=[],
            help=f"{word} that the prompt is about, in the order of its <{kind}> tags",
        )
    parser.add_argument("--prompt", metavar="TEXT", help="what to ask")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="talk in the terminal, turn by turn",
    )
    add_sampling(parser)
    add_ways(parser)
    clip = parser.add_argument_group("clips", "Of models that answer by a clip.")
    clip.add_argument(
        "--out", metavar="FOLDER", help="write the clip there (default: RUN/generated)"
    )
    clip.add_argument(
        "--flow-steps", type=int, default=30, help="Euler steps from noise (default: 30)"
    )
    clip.add_argument(
        "--latents",
        metavar="TIME,ROWS,COLUMNS",
        help="how large its latents are (default: as the embedded clips)",
    )


def run(args: argparse.Namespace) -> Any:
    """Answer; the text goes to stdout as it comes, unless JSON is asked for. A clip is written."""
    from dflop_jax.generate.chat import HELP, chat
    from dflop_jax.generate.clip import generates_clips
    from dflop_jax.generate.generate import Generator
    from dflop_jax.generate.prompt import check_media, tagged
    from dflop_jax.train.compile_cache import use_cache

    config, source = answering_config(args)
    if generates_clips(config):
        return _clip(args, config)
    how = sampling_of(args)
    if args.prompt is None and not args.chat:
        raise ValueError("give --prompt TEXT, or --chat to talk")
    if args.chat and args.json:
        raise ValueError("--chat is for a terminal; leave out --json")
    media = {"image": args.image, "video": args.video, "audio": args.audio}
    # Mistakes show before a model is loaded.
    if args.prompt is not None:
        tagged(args.prompt, {kind: len(files) for kind, files in media.items()})
    check_media(media)
    use_cache(config.cache_dir)
    generator = Generator(config, source, ways=args.ways)
    if args.chat:
        print(HELP, file=sys.stderr)
        return chat(generator, _lines(args.prompt), how, _write, media)
    answer = generator.answer(args.prompt, media, how, None if args.json else _write)
    if not args.json:
        _write("\n")
        if not answer.answer.strip():
            print(f"the answer is empty: {_why_empty(answer)}", file=sys.stderr)
    return answer


def _lines(first: str | None) -> Iterator[str]:
    """What is typed, line by line, after a first one."""
    if first is not None:
        yield first
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        yield line


def _clip(args: argparse.Namespace, config: Config) -> Any:
    from dflop_jax.generate.clip import ClipGenerator
    from dflop_jax.train.compile_cache import use_cache

    if args.image:
        raise ValueError("the model makes clips of a caption; leave out --image")
    if args.prompt is None:
        raise ValueError("give the caption: --prompt TEXT")
    run = args.experiment if Path(args.experiment).is_dir() else config.run_dir
    use_cache(config.cache_dir)
    answer = ClipGenerator(config, args.checkpoint or run).make(
        args.prompt,
        args.out or Path(run) / "generated",
        size=_size(args.latents),
        flow_steps=args.flow_steps,
        seed=args.seed,
    )
    if not args.json:
        show(f"wrote {', '.join(answer.files)}")
    return answer


def _size(text: str | None) -> tuple[int, int, int] | None:
    """The numbers of --latents."""
    if text is None:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if len(numbers) != 3 or not all(n.isdecimal() for n in numbers):
        raise ValueError(f"--latents {text!r}: write TIME,ROWS,COLUMNS, such as 4,6,6")
    time, rows, columns = map(int, numbers)
    return time, rows, columns


def _why_empty(answer: ChatAnswer) -> str:
    if not answer.tokens:
        return "the model ended its turn at once"
    return f"its {len(answer.tokens)} tokens are no text"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
