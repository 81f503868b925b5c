"""What the decoding process makes of good images: pixels, upright, on white."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from server.images.decode_worker import DecodeArgs
from server.images.decoder import DecodeProcess
from tests.support.images.pictures import encoded, noise, png
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def process() -> Iterator[DecodeProcess]:
    process = DecodeProcess()
    yield process
    process.end()


def decoded(
    process: DecodeProcess, data: bytes, declared: str = "", size: tuple[int, int] | None = None
) -> np.ndarray:
    """[height, width, 3], by default of the size that the image has."""
    found, _ = process.ask(DecodeArgs(len(data), declared), data, 20)
    assert not found.error, found.error
    width, height = size or (found.width, found.height)
    result, raw = process.ask(DecodeArgs(len(data), declared, width, height), data, 20)
    assert not result.error, result.error
    return np.frombuffer(raw, np.uint8).reshape(result.height, result.width, 3)


@pytest.mark.parametrize(
    ("format", "declared", "options", "most"),
    [
        ("PNG", "image/png", {}, 0),
        ("PNG", "", {"compress_level": 0}, 0),
        ("BMP", "image/bmp", {}, 0),
        ("WEBP", "image/webp", {"lossless": True}, 0),
        ("WEBP", "image/webp", {"quality": 95}, 20),
        ("JPEG", "image/jpeg", {"quality": 95, "subsampling": 0}, 4),
        ("JPEG", "image/jpg", {"quality": 95, "subsampling": 0, "progressive": True}, 4),
    ],
)
def test_each_format_is_decoded(
    process: DecodeProcess, format: str, declared: str, options: dict[str, object], most: int
) -> None:
    picture = noise(61, 47)
    found = decoded(process, encoded(picture, format, **options), declared).astype(int)
    assert np.abs(found - np.asarray(picture)).mean() <= most


def test_of_a_moving_picture_the_first_frame_is_taken(process: DecodeProcess) -> None:
    first, second = noise(40, 30).quantize(16), noise(40, 30).rotate(180).quantize(16)
    data = encoded(first, "GIF", save_all=True, append_images=[second], duration=100)
    assert (decoded(process, data, "image/gif") == np.asarray(first.convert("RGB"))).all()
    moving = [noise(40, 30), noise(40, 30).rotate(180)]
    data = encoded(moving[0], "WEBP", save_all=True, append_images=moving[1:], lossless=True)
    assert (decoded(process, data) == np.asarray(moving[0])).all()
    data = encoded(moving[0], "PNG", save_all=True, append_images=moving[1:])
    assert (decoded(process, data, "image/apng") == np.asarray(moving[0])).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_turned_as_its_camera_was_held(
    process: DecodeProcess, format: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if format == "WEBP" else {"quality": 100, "subsampling": 0}
    data = encoded(noise(48, 20), format, exif=exif, **lossless)
    from PIL import ImageOps

    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert expected.size == ((20, 48) if orientation > 4 else (48, 20))
    assert (decoded(process, data) == np.asarray(expected)).all()


def test_damaged_notes_of_a_camera_do_not_matter(process: DecodeProcess) -> None:
    data = encoded(noise(48, 20), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\0\0")
    assert (decoded(process, data) == np.asarray(noise(48, 20))).all()


def on_white(layered: Image.Image) -> np.ndarray:
    values = np.asarray(layered.convert("RGBA")).astype(float)
    share = values[..., 3:] / 255
    return values[..., :3] * share + 255 * (1 - share)


def test_transparency_is_laid_on_white(process: DecodeProcess) -> None:
    picture = noise(40, 30)
    layered = picture.copy()
    layered.putalpha(Image.linear_gradient("L").resize((40, 30)))
    grey = picture.convert("LA")
    grey.putalpha(Image.linear_gradient("L").resize((40, 30)))
    for each in (layered, grey):
        assert np.abs(decoded(process, encoded(each)) - on_white(each)).max() < 1.5
    lossless = encoded(layered, "WEBP", lossless=True, exact=True)
    assert np.abs(decoded(process, lossless) - on_white(layered)).max() < 1.5


def test_a_transparent_colour_of_a_palette_is_white(process: DecodeProcess) -> None:
    palette = noise(40, 30).quantize(16)
    clear = np.asarray(palette) == 3
    assert clear.any()
    for format in ("PNG", "GIF"):
        found = decoded(process, encoded(palette, format, transparency=3))
        assert (found[clear] == 255).all()
        assert (found[~clear] == np.asarray(palette.convert("RGB"))[~clear]).all()


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_grey_and_palettes_become_rgb(process: DecodeProcess, mode: str) -> None:
    picture = noise(40, 30).convert(mode)
    assert (decoded(process, encoded(picture)) == np.asarray(picture.convert("RGB"))).all()


def test_cmyk_becomes_rgb(process: DecodeProcess) -> None:
    ink = noise(40, 30).convert("CMYK")
    found = decoded(process, encoded(ink, "JPEG", quality=100, subsampling=0))
    assert np.abs(found.astype(int) - np.asarray(ink.convert("RGB"))).max() < 12


def test_of_16_bits_the_upper_8_are_kept(process: DecodeProcess) -> None:
    levels = np.linspace(0, 65_535, 40 * 30).astype(np.uint16).reshape(30, 40)
    found = decoded(process, encoded(Image.fromarray(levels), "PNG"))
    assert np.abs(found.astype(float) - (levels / 257)[..., None]).max() <= 1
    rows = b"".join(b"\0" + row.astype(">u2").repeat(3).tobytes() for row in levels)
    colours = decoded(process, png(40, 30, rows, depth=16))
    assert np.abs(colours.astype(float) - (levels / 257)[..., None]).max() <= 1


def test_resizing_is_pillows_bicubic(process: DecodeProcess) -> None:
    picture = noise(97, 61)
    found = decoded(process, encoded(picture), size=(64, 32))
    expected = picture.resize((64, 32), Image.Resampling.BICUBIC)
    assert (found == np.asarray(expected)).all()


def test_a_size_is_of_the_picture_as_it_is_stored_and_turned_with_it(
    process: DecodeProcess,
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(noise(96, 40), exif=exif)
    found, _ = process.ask(DecodeArgs(len(data)), data, 20)
    assert (found.width, found.height) == (96, 40)
    assert decoded(process, data, size=(64, 32)).shape == (64, 32, 3)


def test_what_stands_behind_a_picture_is_not_read(process: DecodeProcess) -> None:
    for format in ("PNG", "JPEG", "GIF", "BMP"):
        data = encoded(noise(40, 30), format)
        behind = data + b"PK\x03\x04<script>" + bytes(1000)
        assert (decoded(process, data) == decoded(process, behind)).all()


def test_a_picture_of_the_largest_size_is_decoded_within_the_limits(
    process: DecodeProcess,
) -> None:
    rows = (b"\0" + bytes([200, 100, 50, 128]) * 8192) * 8192
    data = png(8192, 8192, rows, colour=6)
    assert len(data) < 1 << 20
    found = decoded(process, data, size=(2048, 2048))
    assert np.abs(found.astype(int) - [227, 177, 152]).max() <= 1


def test_pillow_is_loaded_by_the_decoding_process_alone() -> None:
    code = (
        "import sys, server.app, server.process.api_process, server.images.decoder, "
        "server.images.source, server.images.fetch; "
        "assert not {'PIL', 'numpy', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
