"""Decoding in processes beside threads, and a long clip by seeking beside from its start.

Command:  python benchmarks/decode.py --json decode.json
Minutes:  about 5 on two cores
Expected: processes no slower than threads once started, the long clip 3 times faster

The dataset is ../shared/data, prepared as LLaVA-OneVision and Qwen2-Audio take it; passes of both
kinds take turns, so that a busy machine slows both. CPU seconds are those of all processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import av
import numpy as np
from json_rows import Rows, add_json, merged
from rich.console import Console
from rich.table import Table

from dflop_jax.config import DataConfig
from dflop_jax.data import Decoder, MediaSpec, Source, make_source
from dflop_jax.data.decoder import BadSample, ThreadDecoder
from dflop_jax.data.media import video
from dflop_jax.data.pool.processes import ProcessDecoder

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
CLIP = "videos/mmaction2_demo.mp4"  # 10 s, a key frame every 2.5 s
MEMORY_BYTES = 4 << 30


def one_pass(source: Source, decoder: Decoder, n: int) -> dict[str, float]:
    """Seconds until the first sample, those for the other n - 1 after it, those for all of them
    once more, CPU seconds of all processes, and bytes of memory that the decoding processes have
    (what they share once)."""
    cpu_s = time.process_time()
    begin_s = time.perf_counter()
    with closing(decoder):
        assert decoder.submit(0).result()
        first_s = time.perf_counter() - begin_s
        rest_s = _decode_s(decoder, range(1, min(n, len(source))))
        again_s = _decode_s(decoder, range(min(n, len(source))))
        cpu_s = time.process_time() - cpu_s + sum(map(_cpu_s, _pids(decoder)))
        memory = sum(map(_memory_bytes, _pids(decoder)))
    return {
        "first_s": first_s,
        "rest_s": rest_s,
        "again_s": again_s,
        "cpu_s": cpu_s,
        "bytes": memory,
    }


def _decode_s(decoder: Decoder, indices: range) -> float:
    begin_s = time.perf_counter()
    begun = [decoder.submit(i) for i in indices]
    decoded = [b.result() for b in begun]
    assert not any(isinstance(d, BadSample) for d in decoded)
    return time.perf_counter() - begin_s


def _pids(decoder: Decoder) -> list[int]:
    """The processes of a decoder; threads have none."""
    if not isinstance(decoder, ProcessDecoder):
        return []
    return decoder.pids()


def _cpu_s(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(pid: int) -> int:
    return 1024 * int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0])


def write_clip(path: Path, source: Path, minutes: float) -> Path:
    """A long clip: a short one, over and over, as it is encoded."""
    with av.open(str(path), "w") as out:
        written, offset, stream = 0.0, 0, None
        while written < minutes * 60:
            with av.open(str(source)) as short:
                video_stream = short.streams.video[0]
                stream = stream or out.add_stream_from_template(video_stream)
                for packet in short.demux(video_stream):
                    if packet.dts is not None and packet.pts is not None:
                        packet.dts, packet.pts = packet.dts + offset, packet.pts + offset
                        packet.stream = stream
                        out.mux(packet)
                assert video_stream.duration
                assert video_stream.time_base
                offset += video_stream.duration
                written += float(video_stream.duration * video_stream.time_base)
    return path


def clip_seconds(path: Path, seek: bool) -> float:
    """CPU seconds to read 32 frames."""
    plan = video.seek_plan
    if not seek:
        video.seek_plan = lambda *args: None
    begin_s = time.process_time()
    try:
        video.read_frames(path, 32, np.asarray)
    finally:
        video.seek_plan = plan
    return time.process_time() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1000, help="most samples of a pass")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the long clip")
    add_json(parser)
    args = parser.parse_args()
    numbers = Rows(args.json, merged)
    numbers.append({"workers": args.workers, "passes": args.passes})
    with tempfile.TemporaryDirectory() as made:
        config = DataConfig(path=str(SHARED / "dataset.json"), max_tokens=20_000, max_frames=16)
        tiles = {"form": "anyres", "tile_px": 384, "tokens_per_tile": 729, "sources": 4}
        spec = MediaSpec.of({"vision": tiles, "audio": {}}, {})
        source = make_source(config, spec, index_dir=made)
        makers: dict[str, Callable[[], Decoder]] = {
            "threads": lambda: ThreadDecoder(source, args.workers),
            "processes": lambda: ProcessDecoder(source, args.workers, 600.0, MEMORY_BYTES),
        }
        rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in makers}
        for _ in range(args.passes):
            for kind, make in makers.items():
                rows[kind].append(one_pass(source, make(), args.samples))
                passes = rows[kind]
                numbers.append(
                    {f"{kind}_{k}": statistics.median(p[k] for p in passes) for k in passes[0]}
                )
        clip = write_clip(Path(made) / "long.mp4", SHARED / CLIP, args.minutes)
        numbers.append({"clip_from_start_cpu_s": clip_seconds(clip, seek=False)})
        numbers.append({"clip_seeking_cpu_s": clip_seconds(clip, seek=True)})
    table = Table("", "value")
    for name, value in merged(numbers).items():
        table.add_row(name, f"{value:,.2f}" if name.endswith("_s") else f"{value:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
