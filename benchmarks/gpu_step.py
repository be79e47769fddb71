"""What one GPU makes of packed attention and of full-width layers, forward and backward.

Command:  python benchmarks/gpu_step.py [--json FILE] [--tiny]
Minutes:  under 8 on one GPU; --tiny under 1 on a CPU, to try the script
Needs:    jax (with CUDA), flax, numpy; not dflop_jax
Expected: attention within bf16 rounding of the reference; layers at half of the chip's peak or more

Attention: the shapes of Qwen2.5-7B (28 heads, 4 kv heads of 128), one row of samples with
heavy-tailed lengths. Layers: a stack of Qwen2.5-7B's and of
SigLIP-400M's, bf16 with float32 parameters, the gradients of parameters and inputs taken. FLOPs
count what must be computed: matrix products, and attention over pairs of tokens of one sample, of
which the causal half; a backward counts two forwards. Times are medians after compilation;
compilations are counted, and none may happen later.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.attention import attention
from models.decoder import DecoderModule
from models.sizes import DECODERS, VISION, DecoderSize, VisionSize
from models.vit import VisionModule

BF16 = jnp.dtype("bfloat16")
# Dense bf16 peak in TFLOP/s by what jax calls the chip: the longest name that is part of it counts.
PEAKS = {
    "A100": 312.0,
    "A10": 125.0,
    "A40": 149.7,
    "L4": 121.0,
    "L40S": 362.0,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.4,
    "H200 NVL": 835.0,
    "GH200": 989.4,
    "H800": 989.4,
    "B200": 2250.0,
    "GB200": 2500.0,
    "RTX A6000": 154.8,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: token counts of packed rows, layers of a stack, and their shapes."""

    tokens: Sequence[int]
    sample_tokens: int  # median length of a sample
    layers: int
    decoder: DecoderSize
    vision: VisionSize
    repeat_s: float  # time that the calls of a measurement take together
    budget_s: float  # nothing is begun later


FULL = Sizes(
    (8192, 16384, 32768), 700, 4, DECODERS["qwen2.5-7b"], VISION["siglip-so400m"], 1.0, 400.0
)
TINY = Sizes((128,), 24, 2, DECODERS["nano"], VISION["nano"], 0.0, math.inf)


def packed_row(tokens: int, median: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """Segment ids int32 [1, tokens] of a row of whole samples and a little padding at its end, and
    the samples' lengths (log-normal)."""
    rng = np.random.default_rng(seed)
    ids, lengths, start = np.zeros((1, tokens), np.int32), [], 0
    while start < tokens * 0.98:
        length = min(tokens - start, max(4, int(median * math.exp(rng.normal()))))
        lengths.append(length)
        ids[0, start : start + length] = len(lengths)
        start += length
    return ids, lengths


# ---- measuring ----


class Compiles:
    """Compilations since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Timing:
    seconds: float | None  # None: out of memory
    late_compiles: int = 0
    result: Any = None


def measure(fn: Callable[..., Any], args: tuple[Any, ...], repeat_s: float, c: Compiles) -> Timing:
    """Median time of a call of jitted `fn` after two that warm it up."""
    try:
        result = jax.block_until_ready(fn(*args))
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        n = max(3, min(50, int(repeat_s / (time.perf_counter() - start))))
        compiled, times = c.count, []
        for _ in range(n):
            start = time.perf_counter()
            jax.block_until_ready(fn(*args))
            times.append(time.perf_counter() - start)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e) and "out of memory" not in str(e).lower():
            raise
        return Timing(None)
    return Timing(float(np.median(times)), c.count - compiled, result)


# ---- what is measured ----


def draw(key: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.jit(lambda k: jax.random.normal(k, shape, jnp.float32).astype(dtype))(
        jax.random.key(key)
    )


def chip() -> str:
    """What the first device is compiled for, as the models want it."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return "cpu"
    return f"sm_{device.compute_capability.replace('.', '')}"


def attention_rows(sizes: Sizes, tokens: int, compiles: Compiles) -> list[dict[str, Any]]:
    """Forward, and forward with backward, by each kernel; errors against float32."""
    s = sizes.decoder
    ids, lengths = packed_row(tokens, sizes.sample_tokens)
    q = draw(0, (1, tokens, s.n_heads, s.head_dim), BF16)
    k, v = (draw(i, (1, tokens, s.n_kv_heads, s.head_dim), BF16) for i in (1, 2))
    wave = draw(3, q.shape, BF16)
    flops = sum(2.0 * n * (n + 1) * s.n_heads * s.head_dim for n in lengths)

    def forward(kernel: str, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, jnp.asarray(ids), causal=True, kernel=kernel, chip=chip())

    def both(kernel: str, q: Any, k: Any, v: Any, wave: Any) -> Any:
        out, pull = jax.vjp(partial(forward, kernel), q, k, v)
        return out, *pull(wave)

    exact = None
    if tokens == sizes.tokens[0]:
        with jax.default_matmul_precision("highest"):
            wide = [x.astype(jnp.float32) for x in (q, k, v, wave)]
            exact = jax.device_get(jax.jit(partial(both, "xla"))(*wide))
    rows = []
    for kernel in ("pallas", "xla") if chip() == "cpu" else ("cudnn", "pallas", "xla"):
        ahead = measure(jax.jit(partial(forward, kernel)), (q, k, v), sizes.repeat_s, compiles)
        whole = measure(jax.jit(partial(both, kernel)), (q, k, v, wave), sizes.repeat_s, compiles)
        errors = None
        if exact is not None and whole.result is not None:
            errors = [
                float(np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max())
                for a, b in zip(whole.result, exact, strict=True)
            ]
        found = zip(("forward", "forward+backward"), (ahead, whole), (flops, 3 * flops))
        rows += [
            row(f"attention {kernel}", what, tokens, t, f, errors if t is whole else None)
            for what, t, f in found
        ]
    return rows


def decoder_rows(sizes: Sizes, tokens: int, compiles: Compiles) -> list[dict[str, Any]]:
    """A stack of decoder layers over one packed row."""
    s = dataclasses.replace(sizes.decoder, n_layers=sizes.layers)
    ids, lengths = packed_row(tokens, sizes.sample_tokens)
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(tokens - sum(lengths))])
    batch = {
        "positions": jnp.asarray(positions[None], jnp.int32),
        "segment_ids": jnp.asarray(ids),
    }
    pairs = sum(2.0 * n * (n + 1) * s.n_heads * s.head_dim for n in lengths)
    kv = s.n_kv_heads * s.head_dim
    products = 2.0 * tokens * (2 * s.width**2 + 2 * s.width * kv + 3 * s.width * s.mlp)
    x = draw(0, (1, tokens, s.width), BF16)
    flops = s.n_layers * (pairs + products)
    module = DecoderModule(s, BF16).on_chip(chip())
    return stack_rows("decoder", module, x, batch, tokens, flops, sizes, compiles)


def vision_rows(sizes: Sizes, tokens: int, compiles: Compiles) -> list[dict[str, Any]]:
    """A stack of tower layers over about as many patches."""
    s = dataclasses.replace(sizes.vision, n_layers=sizes.layers)
    n = s.tokens_in_tower
    tiles = max(1, round(tokens / n))
    per_tile = 4.0 * n**2 * s.width + 2.0 * n * (4 * s.width**2 + 2 * s.width * s.mlp)
    x = draw(0, (tiles, n, s.width), BF16)
    flops = s.n_layers * tiles * per_tile
    module = VisionModule(s, s.width, BF16).on_chip(chip())
    return stack_rows("vision", module, x, {}, tiles * n, flops, sizes, compiles)


def stack_rows(
    name: str,
    module: Any,
    x: jax.Array,
    batch: dict[str, jax.Array],
    tokens: int,
    flops: float,
    sizes: Sizes,
    compiles: Compiles,
) -> list[dict[str, Any]]:
    keys = jax.random.split(jax.random.key(0), module.n_layers)
    params = jax.jit(jax.vmap(partial(module.init, "layers")))(keys)

    def forward(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, p: (module.layer(p, x, batch), None), x, params)[0]

    def both(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return jnp.mean(jnp.square(forward(params, x).astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1))(params, x)

    rows = []
    for what, fn, n in (("forward", forward, 1), ("forward+backward", both, 3)):
        timing = measure(jax.jit(fn), (params, x), sizes.repeat_s, compiles)
        rows.append(row(f"{module.n_layers} {name} layers", what, tokens, timing, n * flops))
    return rows


def row(
    name: str, what: str, tokens: int, t: Timing, flops: float, errors: Any = None
) -> dict[str, Any]:
    return {
        "name": name,
        "direction": what,
        "tokens": tokens,
        "ms": None if t.seconds is None else 1e3 * t.seconds,
        "tflops": None if t.seconds is None else flops / t.seconds / 1e12,
        "errors": errors,  # of the output and the gradients of q, k and v, over the largest value
        "late_compiles": t.late_compiles,
    }


# ---- the table ----


def peak_tflops(kind: str) -> float | None:
    """Dense bf16 peak of a chip by its name, None where it is not known."""
    words = kind.replace("-", " ")
    names = [n for n in PEAKS if all(part in words.split() for part in n.split())]
    return PEAKS[max(names, key=len)] if names else None


def show(rows: Sequence[dict[str, Any]], peak: float | None) -> None:
    line = "{:<18} {:<17} {:>7} {:>10} {:>9} {:>7}  {}"
    print(line.format("what", "direction", "tokens", "ms", "TFLOP/s", "peak", "error"))
    for r in rows:
        ms, tflops, share = "no memory", "-", "-"
        if r["ms"] is not None:
            ms, tflops = f"{r['ms']:.2f}", f"{r['tflops']:.1f}"
            share = f"{r['tflops'] / peak:.0%}" if peak else "?"
        error = f"{max(r['errors']):.1e}" if r["errors"] else ""
        print(line.format(r["name"], r["direction"], r["tokens"], ms, tflops, share, error))


def main() -> int:
    parser = argparse.ArgumentParser(description="One GPU's times of attention and layers.")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on any device")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"No GPU: jax sees only {device.platform}. Times below say nothing of one.")
        if not args.tiny:
            print("Install jax[cuda12] or jax[cuda13] on a machine with a GPU, or give --tiny.")
            return 2
    sizes = TINY if args.tiny else FULL
    start, compiles = time.perf_counter(), Compiles()
    rows: list[dict[str, Any]] = []
    skipped = []
    for tokens in sizes.tokens:
        for part in (attention_rows, decoder_rows, vision_rows):
            if time.perf_counter() - start > sizes.budget_s:
                skipped.append(f"{part.__name__.split('_')[0]} of {tokens}")
            else:
                rows += part(sizes, tokens, compiles)
    peak = peak_tflops(device.device_kind)
    late = sum(r["late_compiles"] for r in rows)
    versions = {m.__name__: m.__version__ for m in (jax, flax, np)}
    elapsed_s = time.perf_counter() - start
    show(rows, peak)
    print(
        f"{device.device_kind}, dense bf16 peak {peak or 'unknown'} TFLOP/s; "
        + ", ".join(f"{k} {v}" for k, v in versions.items())
    )
    print(f"{compiles.count} programs compiled, {late} while measuring; {elapsed_s:.0f} s in all")
    if skipped:
        print(f"left out for lack of time: {', '.join(skipped)}")
    if args.json:
        record = {
            "device": device.device_kind,
            "platform": device.platform,
            "versions": versions,
            "peak_tflops": peak,
            "rows": rows,
            "compiles": compiles.count,
            "late_compiles": late,
            "elapsed_s": elapsed_s,
            "skipped": skipped,
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
