"""Reads picture files as upright RGB, and cuts pictures into square tiles."""

from __future__ import annotations

import numpy as np
from PIL import ExifTags, Image, ImageOps

from dflop_jax.data.bounds import MAX_PIXELS, errors_as
from dflop_jax.data.datasets.blob import MediaFile, open_media

# Pillow also reads scripts (EPS) and formats that are rare for photos; JPEG includes MPO.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
BICUBIC = Image.Resampling.BICUBIC
Size = tuple[int, int]  # width and height in pixels


def picture_size(path: MediaFile) -> Size:
    """Return the upright (width, height) from the header. ValueError: no picture, or too large."""
    with (
        errors_as(f"{path}: not a readable picture"),
        open_media(path) as file,
        Image.open(file, formats=FORMATS) as image,
    ):
        return _upright_size(image)


def read_picture(
    path: MediaFile, size: Size | None = None, min_size: Size | None = None
) -> Image.Image:
    """Return the upright picture in RGB. ValueError: it is broken, or its size is not `size`. A
    JPEG is decoded at 1/2, 1/4 or 1/8 scale if that is still at least `min_size`."""
    with (
        errors_as(f"{path}: cannot be decoded"),
        open_media(path) as file,
        Image.open(file, formats=FORMATS) as image,
    ):
        true_size, orientation = _upright_size(image), _orientation(image)
        if size not in (None, true_size):
            raise ValueError(f"{true_size} pixels, {size} when indexed; start the run again")
        if min_size is not None:
            image.draft(None, min_size[::-1] if orientation >= 5 else min_size)
        if orientation > 1:
            ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)


def _upright_size(image: Image.Image) -> Size:
    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"{width}x{height} pixels is empty")
    if width * height > MAX_PIXELS:
        megapixels = MAX_PIXELS // 10**6
        raise ValueError(f"{width}x{height} exceeds {megapixels} megapixels; scale it down")
    return (height, width) if _orientation(image) >= 5 else (width, height)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, from the header."""
    # Pillow rotates TIFF itself, and would decode a PNG to find EXIF data after the pixels.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    value = image.getexif().get(ExifTags.Base.Orientation, 1)
    return value if value in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return the first frame as RGB. Transparent pixels become white, 16-bit integers are divided
    by 257, floats in 0 to 1 multiplied by 255. ValueError: values out of range."""
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
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def frame_tile(
    image: Image.Image, tile_px: int, resampling: Image.Resampling = BICUBIC
) -> np.ndarray:
    """Return the whole RGB picture or frame as one tile, uint8 [tile_px, tile_px, 3]."""
    return np.asarray(image.resize((tile_px, tile_px), resampling), np.uint8)


def padded_tiles(inner: Image.Image, rows: int, cols: int, tile_px: int) -> np.ndarray:
    """Return the tiles, by row, of a black grid with an RGB picture in the middle: uint8
    [rows * cols, tile_px, tile_px, 3]."""
    canvas = Image.new("RGB", (cols * tile_px, rows * tile_px))
    canvas.paste(inner, ((canvas.width - inner.width) // 2, (canvas.height - inner.height) // 2))
    grid = np.asarray(canvas).reshape(rows, tile_px, cols, tile_px, 3).swapaxes(1, 2)
    return grid.reshape(-1, tile_px, tile_px, 3)
