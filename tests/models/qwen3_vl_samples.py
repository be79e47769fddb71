"""Samples of pictures, clips and text for Qwen3-VL, and what transformers is given for them."""

from dataclasses import dataclass

import numpy as np
from hf_reference import torch

from dflop_jax.data.sample import Places, Sample
from dflop_jax.records import Load

IMAGE, VIDEO = 1, 2  # token ids, and token types, of transformers' placeholders


@dataclass(frozen=True)
class Made:
    """A sample, and the arguments of the reference."""

    sample: Sample
    arguments: dict


def in_blocks(rows, columns):
    """(row, column) of the patches of a grid, 2 x 2 neighbours together."""
    return [
        (r + i, c + j)
        for r in range(0, rows, 2)
        for c in range(0, columns, 2)
        for i in range(2)
        for j in range(2)
    ]


def make_sample(rng, size, content):
    """`content`: ("text", tokens), ("image", rows, columns) and ("video", pairs, rows, columns), in
    patches; a clip's pairs have a token of text before each."""
    tokens, kinds, positions, grids, patches = [], [], [], [], []
    grid_of, pixels_of = {"image": [], "video": []}, {"image": [], "video": []}
    start = 0

    def text(n):
        nonlocal start
        tokens.extend(rng.integers(3, size.decoder.vocab, n))
        kinds.extend([0] * n)
        positions.extend([(start + i,) * 3 for i in range(n)])
        start += n

    def picture(kind, rows, columns):
        nonlocal start
        n = rows * columns
        patches.append(rng.integers(0, 256, (n, size.vision.patch_values), dtype=np.uint8))
        pixels_of[kind].append(patches[-1])
        grids.append([(r, c, rows, columns) for r, c in in_blocks(rows, columns)])
        blocks = [(r, c) for r in range(rows // 2) for c in range(columns // 2)]
        placeholder = IMAGE if kind == "image" else VIDEO
        tokens.extend([placeholder] * len(blocks))
        kinds.extend([placeholder] * len(blocks))
        positions.extend((start, start + r, start + c) for r, c in blocks)
        start += max(rows, columns) // 2

    for kind, *numbers in content:
        if kind == "text":
            text(*numbers)
            continue
        pairs, rows, columns = numbers if kind == "video" else (1, *numbers)
        grid_of[kind].append((pairs, rows, columns))
        for _ in range(pairs):
            if kind == "video":
                text(1)
            picture(kind, rows, columns)

    tokens, seen = np.array(tokens, np.int32), np.array(kinds) > 0
    fields = {
        "llm": {
            "tokens": tokens,
            "positions": np.array(positions, np.int32),
            "is_visual": seen,
            "targets": np.append(tokens[1:], np.int32(0)),
            "weights": (~np.append(seen[1:], True)).astype(np.float32),
        }
    }
    load, places = {"llm": (len(tokens),)}, {}
    if patches:
        fields["vision"] = {
            "patches": np.concatenate(patches),
            "grid": np.concatenate(grids).astype(np.int32),
        }
        load["vision"] = tuple(map(len, patches))
        places["vision", "llm"] = Places(np.where(seen, np.cumsum(seen) - 1, -1)[:, None])
    arguments = {
        "input_ids": torch.from_numpy(tokens[None].astype(np.int64)),
        "mm_token_type_ids": torch.tensor([kinds]),
    }
    for kind, pixels in pixels_of.items():
        if pixels:
            normed = (np.concatenate(pixels).astype(np.float64) / 255 - 0.5) / 0.5
            values = torch.from_numpy(normed.astype(np.float32))
            arguments["pixel_values" + ("_videos" if kind == "video" else "")] = values
            arguments[f"{kind}_grid_thw"] = torch.tensor(grid_of[kind])
    return Made(Sample(fields, places, Load(load)), arguments)
