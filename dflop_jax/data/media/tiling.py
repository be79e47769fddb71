"""Pictures to square tiles: AnyRes of LLaVA-NeXT.

A picture becomes one base tile (the whole picture, resized) and, when it is larger than a tile, a
grid of tiles chosen by its aspect ratio and the resolution that the grid keeps.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
from PIL import ExifTags, Image, ImageOps

from dflop_jax.data.bounds import MAX_PIXELS, errors_as
from dflop_jax.data.datasets.blob import MediaFile, open_media
from dflop_jax.data.media.kind import Kind
from dflop_jax.data.media.media_keys import SIZES

# Pillow also reads scripts (EPS) and formats that nobody keeps photos in; JPEG stands for MPO too
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


@lru_cache(maxsize=65536)
def choose_grid(width: int, height: int, tile_px: int, max_tiles: int) -> tuple[int, int]:
    """(rows, cols) of the grid for a picture of width x height pixels; (0, 0): the base tile only.

    Among the grids of 2..max_tiles tiles, the one that keeps most of the picture's pixels when the
    picture is fitted into it (never counting more than it has), then the one that wastes least.
    """
    if max(width, height) <= tile_px:
        return (0, 0)
    best_grid, best_key = (0, 0), (-1, 0)
    for rows in range(1, max_tiles + 1):
        for cols in range(1, max_tiles // rows + 1):
            if rows * cols == 1:  # would only repeat the base tile
                continue
            w, h = fit_in_box(width, height, cols * tile_px, rows * tile_px)
            kept_pixels = min(w * h, width * height)
            key = (kept_pixels, kept_pixels - rows * cols * tile_px**2)
            if key > best_key:
                best_grid, best_key = (rows, cols), key
    return best_grid


def fit_in_box(width: int, height: int, box_width: int, box_height: int) -> tuple[int, int]:
    """Largest (width, height) of the same aspect ratio inside the box, at least 1 x 1."""
    if width * box_height >= height * box_width:
        return box_width, max(1, height * box_width // width)
    return max(1, width * box_height // height), box_height


def picture_size(path: MediaFile) -> tuple[int, int]:
    """Upright (width, height) from the header. ValueError if it is no picture or too large."""
    with (
        errors_as(f"{path}: not a readable picture"),
        open_media(path) as file,
        Image.open(file, formats=FORMATS) as image,
    ):
        return _upright_size(image)


def read_scaled(
    path: MediaFile, min_size: tuple[int, int] | None
) -> tuple[Image.Image, tuple[int, int]]:
    """Return the picture, upright, in RGB, and its true (width, height).

    With `min_size` (width, height) a JPEG is decoded at 1/2, 1/4 or 1/8 scale where that leaves so
    many pixels. ValueError if broken.
    """
    with (
        errors_as(f"{path}: cannot be decoded"),
        open_media(path) as file,
        Image.open(file, formats=FORMATS) as image,
    ):
        size, orientation = _upright_size(image), _orientation(image)
        if min_size is not None:
            image.draft(None, min_size[::-1] if orientation >= 5 else min_size)
        if orientation > 1:
            ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image), size


def padded_tiles(inner: Image.Image, rows: int, cols: int, tile_px: int) -> np.ndarray:
    """The tiles of a grid with an RGB picture in the middle, black around it, by row: uint8
    [rows * cols, tile_px, tile_px, 3]."""
    canvas = Image.new("RGB", (cols * tile_px, rows * tile_px))
    canvas.paste(inner, ((canvas.width - inner.width) // 2, (canvas.height - inner.height) // 2))
    grid = np.asarray(canvas).reshape(rows, tile_px, cols, tile_px, 3).swapaxes(1, 2)
    return grid.reshape(-1, tile_px, tile_px, 3)


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"{width}x{height} pixels show nothing")
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"{width}x{height} exceeds {MAX_PIXELS // 10**6} megapixels; scale it down"
        )
    return (height, width) if _orientation(image) >= 5 else (width, height)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1-8 as the header gives it, read before any pixel."""
    # Pillow turns TIFF itself, and would decode a PNG to look for EXIF behind the pixels.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    value = image.getexif().get(ExifTags.Base.Orientation, 1)
    return value if value in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """First frame as RGB; transparency shows white; integers of 16 bits are divided by 257, floats
    of 0 to 1 multiplied by 255. ValueError: values beyond."""
    image.load()
    if image.mode[0] in "IF":
        top, values = 1 if image.mode == "F" else 65535, np.asarray(image)
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= top:
            raise ValueError(
                f"pixels of {low:g} to {high:g} have no known range; save them as 0 to {top}"
            )
        grey = np.round(values.astype(np.float64) * (255 / top)).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def frame_tile(image: Image.Image, tile_px: int) -> np.ndarray:
    """The whole RGB picture or frame as one tile, uint8 [tile_px, tile_px, 3]."""
    return np.asarray(image.resize((tile_px, tile_px), Image.Resampling.BICUBIC), np.uint8)


def read_sized(
    path: MediaFile, size: tuple[int, int], min_size: tuple[int, int] | None = None
) -> Image.Image:
    """The picture as `read_scaled` gives it. ValueError: it is broken, or no longer of `size`."""
    image, true_size = read_scaled(path, min_size)
    if true_size != size:
        raise ValueError(f"{path}: {true_size} pixels, {size} when indexed; start the run again")
    return image


IMAGE = Kind(
    name="image",
    noun="picture",
    verb="sees",
    columns=dict.fromkeys(("width", "height", *SIZES), np.int32),  # upright
    header=lambda source: dict(zip(("width", "height"), picture_size(source))),
    opened=lambda source: partial(read_sized, source),
    described=lambda h: f"a picture of {h['width']}x{h['height']} pixels",
    too_small="too thin a picture; crop it",
    keys=SIZES,
    extensions=("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    question="Describe the image.",
    placeholders=("<image>", "<|image_pad|>", "<IMG_CONTEXT>"),
    wrapped=True,
)
