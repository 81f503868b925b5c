"""Pictures to send, and files that are no pictures or broken ones."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture of smooth colours with noise, the same each time."""
    random = np.random.default_rng(width * 10_007 + height)
    y, x = np.mgrid[0:height, 0:width]
    smooth = [127 + 90 * np.sin(x / 9 + c) * np.cos(y / 13 - c) for c in range(3)]
    values = np.stack(smooth, -1) + random.normal(0, 20, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    """A chunk of a PNG file."""
    sum = zlib.crc32(kind + data) if crc is None else crc
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", sum)


def png_header(
    width: int, height: int, *, depth: int = 8, colour: int = 2, interlace: int = 0
) -> bytes:
    fields = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    return PNG + chunk(b"IHDR", fields)


def png(width: int, height: int, rows: bytes, **header: int) -> bytes:
    """A PNG file of rows with a filter byte in front of each."""
    body = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return png_header(width, height, **header) + body


def bmp_header(width: int, height: int, *, bits: int = 24, compression: int = 0) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 14 + len(info), 0, 0, 54) + info


def gif_header(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)


def jpeg_of_size(width: int, height: int) -> bytes:
    """A JPEG file whose header says another size than its data has."""
    data = bytearray(encoded(noise(16, 16), "JPEG"))
    place = data.index(b"\xff\xc0")
    data[place + 5 : place + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def webp_of_size(width: int, height: int) -> bytes:
    """The extended header of a WebP file, whose picture is smaller."""
    inner = encoded(noise(16, 16), "WEBP")[12:]
    sizes = b"".join((side - 1).to_bytes(3, "little") for side in (width, height))
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + sizes
    body = b"WEBP" + extended + inner
    return b"RIFF" + struct.pack("<I", len(body)) + body


def flipped(data: bytes, place: int, bits: int = 0xFF) -> bytes:
    """With some bits of one byte changed."""
    changed = bytearray(data)
    changed[place] ^= bits
    return bytes(changed)


@dataclass(frozen=True)
class BadImage:
    name: str
    data: bytes
    words: str  # of the message
    declared: str = ""

    def __str__(self) -> str:
        return self.name


def _others() -> list[BadImage]:
    """Files of other kinds."""
    none, no_image = "none of these", "no image in PNG, JPEG, WebP, GIF or BMP"
    whole = encoded(noise(40, 30))
    rows = [
        ("empty", b"", "has no bytes"),
        ("one-byte", b"\x89", no_image),
        ("zero-bytes", bytes(4096), none),
        ("text", b"a cat on a mat", none),
        ("utf-16", "a cat".encode("utf-16"), none),
        ("bytes", bytes(range(256)) * 8, none),
        ("html", b"<!DOCTYPE html><html></html>", "an HTML page"),
        ("html-late", b"\n\n  <html><body><img></body></html>", "an HTML page"),
        ("script", b"<script>alert(1)</script>", "an HTML page"),
        ("svg", b'<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
        ("svg-xml", b'\xef\xbb\xbf<?xml version="1.0"?><svg/>', "an SVG drawing"),
        ("xml-entities", b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]>', "an SVG drawing"),
        ("pdf", b"%PDF-1.7\n1 0 obj\n", "a PDF document"),
        ("tiff", encoded(noise(20, 20), "TIFF"), "a TIFF image"),
        ("tiff-big-endian", b"MM\0*\0\0\0\x08" + bytes(64), "a TIFF image"),
        ("zip", b"PK\x03\x04" + bytes(64), "a ZIP archive"),
        ("gzip", b"\x1f\x8b\x08" + bytes(64), "gzip data"),
        ("icon", encoded(noise(32, 32), "ICO"), "an icon"),
        ("jpeg-2000", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64), "a JPEG 2000 image"),
        ("jpeg-xl", b"\xff\x0a" + bytes(64), "a JPEG XL image"),
        ("photoshop", b"8BPS\0\x01" + bytes(64), "a Photoshop document"),
        ("heic", b"\0\0\0\x18ftypheic" + bytes(64), "a HEIC image"),
        ("avif", b"\0\0\0\x18ftypavif" + bytes(64), "an AVIF image"),
        ("mp4", b"\0\0\0\x18ftypisom" + bytes(64), "video"),
        ("webm", b"\x1aE\xdf\xa3" + bytes(64), "video"),
        ("wav", b"RIFF\x24\0\0\0WAVEfmt " + bytes(64), "sound or video"),
        ("ogg", b"OggS" + bytes(64), "sound or video"),
        ("mp3", b"ID3\x04" + bytes(64), "sound"),
        ("base64-twice", b"iVBORw0KGgoAAAANSUhEUg", "encoded twice"),
        ("data-url-inside", b"data:image/png;base64,iVBORw0K", "a data URL inside"),
        ("ppm", b"P6 2 2 255\n" + bytes(12), none),
        ("eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", none),
        ("dds", b"DDS " + bytes(124), none),
        # Files that are of two kinds: the first bytes decide, and these begin as another.
        ("pdf-then-png", b"%PDF-1.7\n" + whole, "a PDF document"),
        ("html-then-png", b"<html>" + whole, "an HTML page"),
        ("zip-then-png", b"PK\x03\x04" + whole, "a ZIP archive"),
        ("space-then-png", b"\n" + whole, none),
        ("gif-script", b"GIF89a=1;alert(document.domain)//", "begins as GIF|decoded as"),
        ("bmp-script", b"BM=1;alert(document.domain)//" + b" " * 99, "begins as BMP|decoded as"),
        ("png-then-zip", PNG + b"PK\x03\x04" + bytes(64), "begins as PNG|decoded as"),
        ("jpeg-then-html", b"\xff\xd8\xff\xe0<html></html>", "begins as JPEG|decoded as"),
        ("webp-of-sound", b"RIFF\x24\0\0\0WEBPfmt " + bytes(64), "begins as WebP|decoded as"),
    ]
    return [BadImage(*row) for row in rows]


def _cut_off() -> list[BadImage]:
    picture = noise(64, 48)
    palette = picture.quantize(16)
    files = {
        "png": encoded(picture),
        "jpeg": encoded(picture, "JPEG"),
        "progressive": encoded(picture, "JPEG", progressive=True),
        "gif": encoded(palette, "GIF"),
        "webp": encoded(picture, "WEBP"),
        "webp-lossless": encoded(picture, "WEBP", lossless=True),
        "bmp": encoded(picture, "BMP"),
    }
    words = "damaged or cut off|none of these"
    rows: list[BadImage] = []
    for name, data in files.items():
        for part, size in (("signature", 8), ("header", 30), ("half", len(data) // 2)):
            rows.append(BadImage(f"{name}-{part}", data[:size], words))
    return rows


def _too_large() -> list[BadImage]:
    words = "at most 67108864 in all are decoded"
    end = chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20)))
    wide = "damaged or cut off|too much memory"
    return [
        BadImage("png-60000-square", png_header(60_000, 60_000) + end, words),
        BadImage("png-one-over", png_header(8193, 8192) + end, words),
        BadImage("png-2-to-the-31", png_header(2**31 - 1, 2**31 - 1) + end, words),
        BadImage("png-wide", png_header(2**31 - 1, 1) + end, words),
        BadImage("png-no-rows-for-its-size", png_header(8000, 8000) + end, wide),
        BadImage("png-text-of-64-mb", png_header(8, 8) + text + end, "damaged"),
        BadImage("gif-65535-square", gif_header(65_535, 65_535) + b";", f"{words}|damaged"),
        BadImage("bmp-100000-square", bmp_header(100_000, 100_000) + bytes(64), words),
        BadImage("jpeg-65500-square", jpeg_of_size(65_500, 65_500), words),
        BadImage("webp-16383-square", webp_of_size(16_383, 16_383), f"{words}|damaged"),
    ]


def _broken() -> list[BadImage]:
    picture = noise(64, 48)
    whole, photo = encoded(picture), encoded(picture, "JPEG")
    animation, lossy = encoded(picture.quantize(16), "GIF"), encoded(picture, "WEBP")
    row = b"\0" + bytes(12)
    words = "damaged or cut off"
    place = whole.index(b"IDAT")
    end = chunk(b"IEND", b"")
    return [
        BadImage("png-no-width", png(0, 4, row * 4), "damaged|0 x 4"),
        BadImage("png-no-size", png(0, 0, b""), "damaged|0 x 0"),
        BadImage("png-header-sum", flipped(whole, 20), words),
        BadImage("png-data-sum", flipped(whole, place + 40), words),
        BadImage("png-data", png_header(4, 4) + chunk(b"IDAT", b"no zlib") + end, words),
        BadImage("png-no-data", png_header(4, 4) + end, words),
        BadImage("png-part-of-a-row", png(4, 400, row * 4 + row[:5]), words),
        BadImage("png-depth-13", png(4, 4, row * 4, depth=13), words),
        BadImage("png-colour-9", png(4, 4, row * 4, colour=9), words),
        BadImage("png-filter-99", png(4, 4, (b"\x63" + bytes(12)) * 4), words),
        BadImage("png-header-twice-short", PNG + chunk(b"IHDR", bytes(4)) + end, words),
        BadImage("png-negative-length", PNG + b"\xff\xff\xff\xffIHDR" + bytes(64), words),
        BadImage("jpeg-tables", photo.replace(b"\xff\xdb", b"\xff\xfe"), words),
        BadImage("jpeg-frame", photo.replace(b"\xff\xc0", b"\xff\xfe"), words),
        BadImage("jpeg-no-height", jpeg_of_size(16, 0), f"{words}|16 x 0"),
        BadImage("jpeg-no-width", jpeg_of_size(0, 16), f"{words}|0 x 16"),
        BadImage("jpeg-no-scan", photo[: photo.index(b"\xff\xda")] + b"\xff\xd9", words),
        BadImage("gif-no-size", gif_header(0, 0) + b";", f"{words}|0 x 0"),
        BadImage("gif-no-frame", gif_header(9, 9) + b";", words),
        BadImage("gif-code-size", _with_code_size(animation, 99), words),
        BadImage("webp-chunk", flipped(lossy, 13), words),
        BadImage("webp-frame", lossy[:20] + bytes(len(lossy) - 20), words),
        BadImage("bmp-13-bits", bmp_header(4, 4, bits=13) + bytes(99), words),
        BadImage("bmp-compression-77", bmp_header(4, 4, compression=77) + bytes(99), words),
        BadImage("bmp-no-size", bmp_header(0, 0) + bytes(99), f"{words}|0 x 0"),
        BadImage("bmp-negative-width", bmp_header(-4, 4) + bytes(99), f"{words}|67108864"),
        BadImage("bmp-few-rows", bmp_header(400, 400) + bytes(99), words),
    ]


def _with_code_size(gif: bytes, size: int) -> bytes:
    """With another size of LZW codes, behind the descriptor of the first frame."""
    image = Image.open(io.BytesIO(gif))
    [tile] = image.tile
    return gif[: tile.offset] + bytes([size]) + gif[tile.offset + 1 :]


def _declared() -> list[BadImage]:
    whole, photo = encoded(noise(40, 30)), encoded(noise(40, 30), "JPEG")
    is_png = "its bytes are image/png"
    return [
        BadImage("png-as-jpeg", whole, is_png, "image/jpeg"),
        BadImage("png-as-webp", whole, is_png, "image/webp"),
        BadImage("png-as-svg", whole, is_png, "image/svg+xml"),
        BadImage("png-as-tiff", whole, is_png, "image/tiff"),
        BadImage("jpeg-as-png", photo, "its bytes are image/jpeg", "image/png"),
        BadImage("jpeg-as-gif", photo, "its bytes are image/jpeg", "image/gif"),
        BadImage("html-as-png", b"<html></html>", "an HTML page", "image/png"),
    ]


def bad_images() -> list[BadImage]:
    """Each is refused with a message that holds one of its words, which | separates."""
    return [*_others(), *_cut_off(), *_too_large(), *_broken(), *_declared()]
