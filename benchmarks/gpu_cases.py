"""Compiles programs and times them in turns, a line for each; and programs of products and
attention alone. For `benchmarks/gpu_lease.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.aot.chips import CHIPS
from dflop_jax.aot.hlo_cost import program_cost
from dflop_jax.aot.hlo_text import parse_hlo
from dflop_jax.contract import chip_of
from dflop_jax.hardware import find_hardware
from dflop_jax.profile.kernels import Kind, program_s
from dflop_jax.records import Hardware
from models.attention import attention
from models.attention_choice import KERNELS, choose_kernel

BF16 = jnp.dtype("bfloat16")
Tree = Any


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


def draw(structs: Tree, scale: float = 1.0) -> Tree:
    """Random floats on the structs' device; whole numbers are 0."""

    def one(key: jax.Array, a: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return jnp.zeros(a.shape, a.dtype)
        return (scale * jax.random.normal(key, a.shape, jnp.float32)).astype(a.dtype)

    leaves, tree = jax.tree.flatten(structs)
    if not leaves:
        return structs

    def values() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))
        return [one(k, a) for k, a in zip(keys, leaves, strict=True)]

    return jax.tree.unflatten(tree, jax.jit(values, out_shardings=[a.sharding for a in leaves])())


# ---- ceilings ----


def product(bench: Bench, size: int) -> Case:
    """A product of square matrices of random values, as a ceiling."""
    args = (bench.struct((size, size), BF16),) * 2
    return Case(
        {"name": f"product {size}"},
        partial(jax.jit(jnp.matmul).lower, *args),
        partial(draw, args),
        flops=2.0 * size**3,
    )


# ---- attention ----


def attention_cases(
    bench: Bench,
    name: str,
    shape: tuple[int, int, int, int],
    kv_heads: int,
    lengths: Sequence[int] | None,
    *,
    causal: bool,
    checked: bool = False,
) -> Iterator[Case]:
    """Each kernel forward, and forward with backward.

    Args:
      shape: of queries [rows, tokens, heads, head_dim].
      lengths: of the pieces that one row packs; None where all tokens see each other.
      checked: whether outputs and gradients are compared with float32.
    """
    rows, tokens, heads, head_dim = shape
    q, kv = (bench.struct((rows, tokens, n, head_dim), BF16) for n in (heads, kv_heads))
    ids = None if lengths is None else bench.struct((rows, tokens), jnp.int32)
    pairs = rows * sum(n * (n + 1) // 2 if causal else n * n for n in lengths or (tokens,))
    flops = 4.0 * pairs * heads * head_dim
    make = partial(_attention_inputs, q, kv, ids, lengths)
    chip = chip_of(bench.device)
    exact = _exact(make, causal) if checked and bench.runs else None
    chosen: dict[str, str] = {}
    for kernel in KERNELS:
        named = choose_kernel(kernel, chip, BF16, shape, is_packed=ids is not None)
        if checked or named != "xla":
            chosen.setdefault(named, kernel)
    for named, kernel in chosen.items():
        call = partial(attention, causal=causal, kernel=kernel, chip=chip)
        for direction, function, times in (("forward", call, 1), ("both", _both(call), 3.5)):
            yield Case(
                {"name": f"attention {name} {named} {direction}", "shape": shape},
                partial(_lower_attention, function, q, kv, ids, direction),
                partial(lambda make, d: make() if d == "both" else make()[:4], make, direction),
                flops=times * flops,
                check=partial(_errors, exact if direction == "both" else None),
                seen_pairs=pairs / (rows * tokens**2),
            )  # fmt: skip


def _both(call: Callable[..., Any]) -> Callable[..., Any]:
    """Output and gradients of queries, keys and values."""

    def both(q: Any, k: Any, v: Any, ids: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: call(q, k, v, ids), q, k, v)
        return out, *pull(dout)

    return both


def _lower_attention(
    function: Callable[..., Any], q: Any, kv: Any, ids: Any, direction: str
) -> jax.stages.Lowered:
    extra = (q,) if direction == "both" else ()
    # From jax 0.11 on, Pallas takes the chip of absent devices from a mesh.
    with jax.set_mesh(jax.sharding.Mesh(np.array([*q.sharding.device_set]), ("data",))):
        return jax.jit(function).lower(q, kv, kv, ids, *extra)


def _attention_inputs(q: Any, kv: Any, ids: Any, lengths: Any) -> tuple[Any, ...]:
    """Queries, keys, values, segment ids and a cotangent."""
    queries, keys, values, dout = draw((q, kv, kv, q))
    if ids is not None:
        row = np.zeros(ids.shape[1], np.int32)
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
        ids = jax.device_put(np.broadcast_to(row, ids.shape), ids.sharding)
    return queries, keys, values, ids, dout


def _exact(make: Callable[[], tuple[Any, ...]], causal: bool) -> Any:
    """Output and gradients in float32."""
    q, k, v, ids, dout = make()
    wide = [a.astype(jnp.float32) for a in (q, k, v, dout)]
    call = partial(attention, causal=causal, kernel="xla")
    with jax.default_matmul_precision("highest"):
        return jax.device_get(jax.jit(_both(call))(*wide[:3], ids, wide[3]))


def _errors(exact: Any, found: Any) -> Line:
    """Largest error of output and gradients over their largest value."""
    if exact is None:
        return {}
    pairs = zip(found, exact, strict=True)
    return {"errors": [float(np.abs(np.float32(a) - b).max() / np.abs(b).max()) for a, b in pairs]}


# ---- compile and time ----

Line = dict[str, Any]
ROUNDS = 12  # in which every case of a batch has its turn
LEAST_S = 2e-3  # a turn calls a program as often as this takes


@dataclass(frozen=True)
class Bench:
    """Where and how long is measured.

    Attributes:
      device: a GPU, the CPU for a trial, or one that is only described.
      hardware: its data sheet, None where there is none.
      runs: whether programs are run, or compiled only.
      known: names of cases that are not measured again.
    """

    device: jax.Device
    hardware: Hardware | None
    runs: bool
    rounds: int = ROUNDS
    known: frozenset[str] = frozenset()

    def struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        here = jax.sharding.SingleDeviceSharding(self.device)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      facts: what its line says beside the figures.
      lower: () -> it, ready to be compiled.
      make: () -> its arguments on the device.
      flops: that it needs.
      again: (arguments, outputs) -> arguments of the next call, where some are donated.
      check: outputs -> more facts.
      seen_pairs: see `visible_pairs` of `dflop_jax.aot.hlo_cost.program_cost`.
    """

    facts: Line
    lower: Callable[[], jax.stages.Lowered]
    make: Callable[[], tuple[Any, ...]]
    flops: float = 0.0
    again: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda args, _: args
    check: Callable[[Any], Line] = lambda _: {}
    seen_pairs: float = 1.0


@dataclass
class _Timed:
    case: Case
    program: jax.stages.Compiled
    line: Line
    args: tuple[Any, ...] = ()
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    def turn(self) -> None:
        start = time.perf_counter()
        for _ in range(self.calls):
            out = self.program(*self.args)
            self.args = self.case.again(self.args, out)
        jax.block_until_ready(out)
        self.seconds.append((time.perf_counter() - start) / self.calls)


class Deadline:
    """Seconds that a part may take."""

    def __init__(self, seconds: float):
        self._end = time.perf_counter() + seconds

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._end


def hardware_of(device: jax.Device) -> Hardware | None:
    """The data sheet of a device that programs can be compiled for; None of others."""
    names = [n for n, chip in CHIPS.items() if device.device_kind.startswith(chip.device)]
    return find_hardware(names[0]) if names else None


def measure(bench: Bench, cases: Iterable[Case], deadline: Deadline) -> Iterator[Line]:
    """A line of each case, in turns with the others: the medians then share what the chip's clock
    did meanwhile. Cases that the deadline or the memory leaves no room for say so."""
    ready = []
    for case in cases:
        if case.facts["name"] in bench.known:
            continue
        if deadline.is_over:
            yield {**case.facts, "error": "no time"}
            continue
        try:
            timed = _compiled(bench, case)
            if bench.runs:
                _warm_up(timed)
        except Exception as e:  # of one case: the others are still worth their lines
            yield {**case.facts, "error": " ".join(str(e).split())[:300]}
            continue
        ready.append(timed)
    for _ in range(bench.rounds if bench.runs else 0):
        if deadline.is_over and all(t.seconds for t in ready):
            break
        for timed in ready:
            timed.turn()
    for timed in ready:
        yield timed.line | _figures(bench, timed)


def _compiled(bench: Bench, case: Case) -> _Timed:
    lowered = case.lower()
    start = time.perf_counter()
    program = lowered.compile()
    line = case.facts | {"compile_s": time.perf_counter() - start}
    line["peak_bytes"] = memory_bytes(program)
    if bench.hardware is not None:
        line |= predicted(program, bench.hardware, case.seen_pairs, case.flops)
    return _Timed(case, program, line)


def memory_bytes(program: jax.stages.Compiled) -> float:
    """Bytes of a program with its arguments, as the compiler counts them; 0: unknown."""
    stats = program.memory_analysis()
    if stats is None:
        return 0.0
    out = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return float(stats.argument_size_in_bytes + stats.temp_size_in_bytes + out)


def predicted(
    program: jax.stages.Compiled, hardware: Hardware, seen_pairs: float = 1.0, flops: float = 0.0
) -> Line:
    """Milliseconds under the roofline of plans, one kernel after another; the share of pads, slices
    and copies; and MFU where `flops`."""
    kernels = program_cost(parse_hlo(program.as_text() or ""), seen_pairs).kernels
    ms = 1e3 * program_s(kernels, 1, hardware)
    copy_s = program_s((k for k in kernels if k.kind == Kind.COPY), 1, hardware)
    mfu = {"predicted_mfu": 1e3 * flops / hardware.bfloat16_flops / ms} if flops else {}
    return {"predicted_ms": ms, "copy_share": 1e3 * copy_s / ms, **mfu}


def _warm_up(timed: _Timed) -> None:
    """A call whose outputs are checked, and one that says how many make a turn."""
    args = timed.case.make()
    out = jax.block_until_ready(timed.program(*args))
    timed.line |= timed.case.check(out)
    timed.args = timed.case.again(args, out)
    timed.turn()
    timed.calls = max(1, min(100, int(LEAST_S / timed.seconds.pop())))


def _figures(bench: Bench, timed: _Timed) -> Line:
    if not timed.seconds:
        return {}
    low, middle, high = np.percentile(timed.seconds, [10, 50, 90]).tolist()
    case, found = timed.case, {"ms": 1e3 * middle, "ms_p10": 1e3 * low, "ms_p90": 1e3 * high}
    if case.flops:
        found["tflops"] = case.flops / middle / 1e12
        if bench.hardware is not None:
            found["of_peak"] = case.flops / middle / bench.hardware.bfloat16_flops
    return found
