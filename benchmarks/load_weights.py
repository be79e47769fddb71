"""Peak host memory while a published checkpoint is read into a submesh.

Command:  python benchmarks/load_weights.py [--gb 2] [--width 2048] [--json FILE]
Minutes:  under 1
Expected: less than 500 MB of host memory over the baseline beside the arrays themselves

A random checkpoint of Qwen2.5 form in bfloat16 is written, then read in a process of its own into
float32 parameters over (stage 2, model 2). The baseline is that process with jax started and
nothing loaded. On a GPU the parameters do not live in host memory and the whole peak counts. On
CPU devices they do: what is over the baseline then holds the arrays, which are counted apart, and
`transient` is the rest, that is what reading itself needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from json_rows import add_json, write_json
from rich.console import Console
from rich.table import Table

from dflop_jax.pipeline.layout import make_segments
from dflop_jax.records import Bucket, Layout, Plan, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.weights import Folder, ModuleParams, read_segment, write_folder
from models import hf
from models.decoder import DecoderModule
from models.sizes import DecoderSize

TARGET_MB = 500.0
MB = 1e6
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class Random:
    """A parameter that is drawn when it is looked at, a layer at a time."""

    shape: tuple[int, ...]
    dtype: Any

    def __getitem__(self, layer: int) -> np.ndarray:
        return _draw(self.shape[1:], layer)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return _draw(self.shape, 0)


def _draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, np.float32) - 0.5


@dataclasses.dataclass(frozen=True)
class OneModule:
    """A model of an LLM only."""

    llm: DecoderModule
    edges: Sequence[Mapping[str, Any]] = ()
    piece_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    preprocessing: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.llm.size.vocab

    @property
    def modules(self) -> dict[str, DecoderModule]:
        return {"llm": self.llm}


def module_of(gb: float, width: int) -> DecoderModule:
    """As many layers as give about `gb` GB in bfloat16."""
    base = DecoderSize(width, 1, width // 128, 2, 11 * width // 4, 25 * width)
    one, two = (
        sum(
            np.prod(t.layout.file_shape)
            for t in hf.decoder(_module(dataclasses.replace(base, n_layers=n))).tensors
        )
        for n in (2, 4)
    )
    layers = 2 + 2 * round((gb * 1e9 / 2 - one) / (two - one))  # even: two stages
    return _module(dataclasses.replace(base, n_layers=max(2, layers)))


def _module(size: DecoderSize) -> DecoderModule:
    return DecoderModule(size, jax.numpy.dtype("float32"))


def make(folder: Path, module: DecoderModule) -> int:
    """Write the random checkpoint; bytes of its files."""
    tree: dict[str, Any] = {}
    for t in hf.decoder(module).tensors:
        at = tree.setdefault(t.part, {})
        for key in t.path[:-1]:
            at = at.setdefault(key, {})
        lead = () if t.layer is None else (module.n_layers,)
        at[t.path[-1]] = Random((*lead, *t.layout.shape), np.dtype("float32"))
    write_folder(
        folder,
        hf.decoder(module),
        [ModuleParams("llm", tree)],
        dtype="bfloat16",
        max_file_bytes=10**9,
    )
    return sum(f.stat().st_size for f in folder.iterdir())


def plan(n_layers: int) -> Plan:
    n = len(jax.devices())
    shape = (2, 1, 2) if n >= 4 else (1, 1, 1)
    return Plan(
        "load",
        Layout(
            (SubmeshPlan("llm", 0, *shape),),
            (SegmentPlan("llm", "llm", 0, n_layers, "llm", True, True),),
            (Bucket.of({"llm": Shape(1, 64)}),),
            group_size=2,
        ),
    )


def memory_mb(key: str) -> float:
    """VmRSS (now) or VmHWM (the most since it was cleared) of this process."""
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024 / MB


def load(folder: str, module: DecoderModule) -> dict[str, Any]:
    """Read the checkpoint and say what it took; runs in a process of its own."""
    (segment,) = make_segments(
        OneModule(module), plan(module.n_layers).layout, jax.devices()
    ).values()
    # Threads, allocators and the compiler are there before the baseline is taken.
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    baseline = memory_mb("VmRSS")
    CLEAR.write_text("5")
    started = time.perf_counter()
    source = Folder(folder, hf.decoder(module))
    source.check()
    params = jax.block_until_ready(read_segment(source, segment))
    seconds = time.perf_counter() - started
    peak = memory_mb("VmHWM")
    platform = jax.devices()[0].platform
    arrays = sum(s.data.nbytes for a in jax.tree.leaves(params) for s in a.addressable_shards)
    on_host = arrays / MB if platform == "cpu" else 0.0
    return {
        "platform": platform,
        "devices": segment.mesh.size,
        "baseline_mb": baseline,
        "peak_over_baseline_mb": peak - baseline,
        "arrays_mb": arrays / MB,
        "arrays_on_host_mb": on_host,
        "transient_mb": peak - baseline - on_host,
        "load_s": seconds,
        "target_mb": TARGET_MB,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--width", type=int, default=2048, help="width of the model, 256 or more")
    add_json(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gb <= 0:
        parser.error(f"--gb {args.gb}: give a positive size in GB")
    if args.width < 256 or args.width % 256:
        parser.error(f"--width {args.width}: give a multiple of 256")
    if args.child:
        jax.config.update("jax_num_cpu_devices", 4)
        print(json.dumps(load(args.child, module_of(args.gb, args.width))))
        return 0
    if not CLEAR.exists():
        parser.error("needs /proc/self/clear_refs to measure peaks: run it on Linux")
    with tempfile.TemporaryDirectory() as folder:
        n_bytes = make(Path(folder) / "checkpoint", module_of(args.gb, args.width))
        size = ["--gb", str(args.gb), "--width", str(args.width)]
        child = subprocess.run(
            [sys.executable, __file__, *size, "--child", f"{folder}/checkpoint"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    row = {"file_mb": n_bytes / MB, **json.loads(child.stdout.splitlines()[-1])}
    show(row)
    write_json(args.json, row)
    return 0 if row["transient_mb"] < TARGET_MB else 1


def show(row: dict[str, Any]) -> None:
    table = Table(title=f"reading a checkpoint on {row['devices']} {row['platform']} devices")
    for name in ("file", "arrays", "peak over baseline", "of which arrays", "transient", "target"):
        table.add_column(f"{name} MB", justify="right")
    table.add_column("s", justify="right")
    keys = ("file", "arrays", "peak_over_baseline", "arrays_on_host", "transient", "target")
    table.add_row(*(f"{row[f'{k}_mb']:.0f}" for k in keys), f"{row['load_s']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
