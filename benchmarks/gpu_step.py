"""What one GPU makes of products, attention, the engine's programs and whole steps, against what
was predicted of it.

Command:  python benchmarks/gpu_step.py [--json FILE] [--parts NAME ...]
          python benchmarks/gpu_step.py --compile-only [h100|h200]    without a GPU
          python benchmarks/gpu_step.py --tiny                        toy sizes, on any device
Minutes:  at most 10 on one H100 or H200; --compile-only about 15 on 2 cores; --tiny under 1
Needs:    jax[cuda13] or jax[cuda12], flax, optax, msgspec, numpy; on a machine without a network
          carry the wheels of those that it lacks. --compile-only: the extra gpu-compile
Expected: products at 70% of the chip's peak or more on random values; segments within 15% of
          predicted_ms

A JSON line per result, as it is found. Every part has a deadline, and says what it left out. The
programs of a part are timed in turns: `ms` is a median, `ms_p10` and `ms_p90` its spread.
`peak_bytes` is what the compiler says of a program with its arguments. `predicted_ms` follows from
its HLO and the roofline of plans (`dflop_jax/profile/kernels.py`); `flat_ms` has all products,
attention's too, at 70% of the peak. FLOPs are those needed: products, attention over pairs of
tokens of one piece, of which the causal half.

Segments are layers of Qwen2.5-7B between two others (inner) or with its head and loss (last), and
of SigLIP-400M with its ends (encoder); the step is that of LLaVA-OneVision-0.5B (SigLIP-400M before
Qwen2-0.5B) on one device, bfloat16 with float32 masters.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
from gpu_cases import (
    Bench,
    Deadline,
    Line,
    attention_cases,
    ceilings,
    hardware_of,
    head,
    measure,
    packed_row,
)
from gpu_engine import (
    encoder_segment,
    inner_segment,
    last_segment,
    segment_cases,
    step_programs,
    whole_steps,
)
from json_rows import add_json, write_json

from dflop_jax.aot.chips import absent_devices, compiler_environment, find_chip
from dflop_jax.hardware import find_hardware
from dflop_jax.records import Remat, Shape
from models.sizes import DECODERS, VISION, DecoderSize, VisionSize

CHILD = "--compiling"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    product: int
    depths: Sequence[int]
    copied_bytes: int
    tokens: Sequence[int]  # of attention's rows, the first also as a single piece
    sample_tokens: int  # median length of a piece
    tiles: int
    layers: Sequence[int]
    rows: Sequence[int]  # of segments, in tokens
    decoder: DecoderSize
    vision: VisionSize
    model: str
    groups: int


FULL = Sizes(
    8192, (1024, 8192), 2**31, (8192, 32768), 700, 16, (2, 4), (2048, 8192),
    DECODERS["qwen2.5-7b"], VISION["siglip-so400m"], "llava-ov-0.5b", 8,
)  # fmt: skip
TINY = Sizes(
    64, (32,), 2**12, (128,), 24, 2, (2,), (32,), DECODERS["nano"], VISION["nano"], "nano", 2,
)  # fmt: skip


def run_ceilings(bench: Bench, sizes: Sizes, deadline: Deadline) -> Iterator[Line]:
    cases = ceilings(bench, sizes.product, sizes.depths, sizes.copied_bytes)
    yield from measure(bench, list(cases), deadline)


def run_attention(bench: Bench, sizes: Sizes, deadline: Deadline) -> Iterator[Line]:
    d, v = sizes.decoder, sizes.vision
    first = sizes.tokens[0]
    for tokens in sizes.tokens:
        _, lengths = packed_row(tokens, sizes.sample_tokens)
        shape = (1, tokens, d.n_heads, d.head_dim)
        checked = tokens == first
        packed = attention_cases(
            bench, "packed", shape, d.n_kv_heads, lengths, causal=True, checked=checked
        )
        yield from measure(bench, list(packed), deadline)
        single = attention_cases(bench, "single", shape, d.n_kv_heads, None, causal=True)
        yield from measure(bench, list(single), deadline)
    shape = (sizes.tiles, v.tokens_in_tower, v.n_heads, v.head_dim)
    tiles = attention_cases(bench, "tiles", shape, v.n_heads, None, causal=False)
    yield from measure(bench, list(tiles), deadline)


def run_segments(bench: Bench, sizes: Sizes, deadline: Deadline) -> Iterator[Line]:
    """Of each kind, all kept."""
    most, decoder, vision = max(sizes.layers), sizes.decoder, sizes.vision
    for tokens in sizes.rows:
        for name, segment in (("inner", inner_segment), ("last", last_segment)):
            make = partial(segment, bench, decoder, most)
            cases = segment_cases(bench, name, make, Shape(1, tokens), ("none",))
            yield from measure(bench, list(cases), deadline)
    make = partial(encoder_segment, bench, vision, most, decoder.width)
    tiles = Shape(sizes.tiles, vision.tokens_in_tower)
    yield from measure(
        bench, list(segment_cases(bench, "encoder", make, tiles, ("none",))), deadline
    )


def run_policies(bench: Bench, sizes: Sizes, deadline: Deadline) -> Iterator[Line]:
    """Inner segments under every recompute policy, but for what `run_segments` has."""
    for layers in sizes.layers:
        remats = [r for r in get_args(Remat) if r != "none" or layers < max(sizes.layers)]
        for tokens in sizes.rows:
            make = partial(inner_segment, bench, sizes.decoder, layers)
            cases = segment_cases(bench, "inner", make, Shape(1, tokens), remats)
            yield from measure(bench, list(cases), deadline)


def run_head(bench: Bench, sizes: Sizes, deadline: Deadline) -> Iterator[Line]:
    for tokens in sizes.rows:
        yield from measure(bench, list(head(bench, sizes.decoder, tokens)), deadline)


def run_step(bench: Bench, sizes: Sizes, deadline: Deadline) -> Iterator[Line]:
    args = bench, sizes.model, sizes.tiles, sizes.rows[-1]
    if bench.runs:
        folder = Path("runs") / f"gpu_step-{int(time.time())}"
        yield from whole_steps(*args, sizes.groups, folder, deadline)
    else:
        yield from step_programs(*args)


# Parts by name, with the seconds that each may take.
PARTS: dict[str, tuple[Callable[[Bench, Sizes, Deadline], Iterator[Line]], float]] = {
    "ceilings": (run_ceilings, 30.0),
    "step": (run_step, 170.0),
    "head": (run_head, 30.0),
    "attention": (run_attention, 100.0),
    "segments": (run_segments, 80.0),
    "policies": (run_policies, 160.0),
}


class Compiles:
    """Programs compiled since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def run_parts(bench: Bench, sizes: Sizes, names: Sequence[str]) -> Iterator[Line]:
    """Lines of the parts; of one that fails the reason, and the others go on."""
    for name in names:
        part, seconds = PARTS[name]
        deadline = Deadline(seconds if bench.runs else float("inf"))
        start = time.perf_counter()
        try:
            for line in part(bench, sizes, deadline):
                yield {"part": name, **line}
        except Exception as e:  # of one part
            yield {"part": name, "error": f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"}
        jax.clear_caches()
        yield {"part": name, "name": "part", "seconds": time.perf_counter() - start}


def show(line: Line) -> str:
    """A line with figures of four digits."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, dict):
            return {k: short(v) for k, v in value.items()}
        return [short(v) for v in value] if isinstance(value, list) else value

    return json.dumps(short(line))


def compile_elsewhere(arguments: Sequence[str]) -> int:
    """Run this script again where jax finds the GPU's compiler and no GPU."""
    command = [sys.executable, __file__, *arguments, CHILD]
    return subprocess.run(command, env=compiler_environment(), check=False).returncode


def the_bench(args: argparse.Namespace) -> Bench:
    rounds = 3 if args.tiny else 12
    if args.compile_only:
        hardware = find_hardware(args.compile_only)
        return Bench(absent_devices(hardware, 1)[0], hardware, False)
    device = jax.devices()[0]
    return Bench(device, hardware_of(device), True, rounds)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on any device")
    parser.add_argument("--compile-only", nargs="?", const="h100", metavar="CHIP",
                        help="compile all of it for a chip that is not here (h100)")  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add_json(parser)
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.compile_only:
            find_chip(args.compile_only)
            if not args.compiling:
                sys.exit(compile_elsewhere(sys.argv[1:]))
    except ValueError as e:
        parser.error(str(e))
    return args


def main() -> int:
    args = parsed()
    platform = jax.devices()[0].platform
    if platform != "gpu" and not (args.tiny or args.compile_only):
        print(f"No GPU: jax sees only {platform}. Times of it say nothing of one.")
        print("Install jax[cuda12] or jax[cuda13] on a machine with a GPU, or give --compile-only "
              "or --tiny.")  # fmt: skip
        return 2
    # Autotuning and cuDNN's plans would be written and read again: every program is compiled here.
    jax.config.update("jax_enable_compilation_cache", False)
    compiles, start, failed = Compiles(), time.perf_counter(), 0
    bench = the_bench(args)
    sizes = TINY if args.tiny else FULL
    lines: list[Line] = []

    def tell(line: Line) -> None:
        lines.append(line)
        print(show(line), flush=True)
        write_json(args.json, lines)

    tell({"name": "device", "kind": bench.device.device_kind, "runs": bench.runs,
          "predicted_for": bench.hardware.name if bench.hardware else None,
          "jax": jax.__version__})  # fmt: skip
    for line in run_parts(bench, sizes, args.parts):
        failed += "error" in line
        tell(line)
    elapsed_s = time.perf_counter() - start
    tell({"name": "end", "compiles": compiles.count, "errors": failed, "seconds": elapsed_s})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
