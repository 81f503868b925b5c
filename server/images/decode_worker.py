"""A process that decodes images: `python -m server.images.decode_worker`.

An image is a caller's input to libraries of native code.  Here it may take too much memory or time
or end the process, and only its caller notices.  A request on stdin and an answer on stdout are
each a length of four bytes, MessagePack, and bytes; the end of stdin ends the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import resource
import signal
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from msgspec import Struct

from server.images.image_error import ImageError
from server.metrics.image_causes import ImageCause

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_MEMORY = 2 << 30  # bytes of address space
CPU_SECONDS = 10.0  # of a core, for one image; the largest that is taken needs two to four
MAX_SOURCE_PIXELS = 64 << 20  # before it is resized
MEDIA_TYPES = {  # format -> its media types, the usual one first
    "PNG": ("image/png", "image/apng", "image/x-png"),
    "JPEG": ("image/jpeg", "image/jpg", "image/pjpeg"),
    "WEBP": ("image/webp",),
    "GIF": ("image/gif",),
    "BMP": ("image/bmp", "image/x-ms-bmp", "image/x-bmp"),
}
FORMATS = "PNG, JPEG, WebP, GIF or BMP"
SIGNATURES = {  # of what is sent most often in place of them
    b"%PDF": "a PDF document",
    b"II*\0": "a TIFF image",
    b"MM\0*": "a TIFF image",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "gzip data",
    b"\0\0\x01\0": "an icon",
    b"\0\0\0\x0cjP  ": "a JPEG 2000 image",
    b"\xff\x0a": "a JPEG XL image",
    b"8BPS": "a Photoshop document",
    b"\x1aE\xdf\xa3": "video",
    b"ID3": "sound",
    b"OggS": "sound or video",
    b"data:": "a data URL inside of another",
    b"iVBOR": "base64 that was encoded twice",
    b"/9j/": "base64 that was encoded twice",
}
BRANDS = {  # of ISO media files, which say it behind the length of their first box
    b"avi": "an AVIF image",
    b"hei": "a HEIC image",
    b"hev": "a HEIC image",
    b"mif": "a HEIC image",
}
ORIENTATION = 0x0112  # the tag of EXIF
SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange width and height


class DecodeArgs(Struct, frozen=True, array_like=True):
    """What is to be done with an image whose bytes follow."""

    num_bytes: int
    declared: str = ""  # its media type; "": the caller did not say
    width: int = 0  # to resize to, before it is turned upright; 0: only its size is asked for
    height: int = 0


class DecodeResult(Struct, frozen=True, array_like=True):
    """`num_bytes` bytes of pixels follow: RGB, row by row from the top."""

    error: str = ""  # goes on after the name of a field
    width: int = 0
    height: int = 0
    num_bytes: int = 0
    digest: bytes = b""  # SHA-256 of the size and the pixels
    cause: ImageCause = "damaged"  # of an error


def inspect(data: bytes, declared: str = "") -> Image:
    """An image of which no pixel has been decoded.  Raises ImageError."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ImageError("has no bytes: send the whole file", "format")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=tuple(MEDIA_TYPES))
    except UnidentifiedImageError:
        raise ImageError(_unknown(data), "format") from None
    except MemoryError:
        raise ImageError("takes too much memory to read: make it smaller", "size") from None
    except Exception as error:  # whatever a parser raises is the file's fault here
        raise ImageError(_damaged(_seems(data) or "an image", error), "damaged") from None
    _check_type(declared, _format(image))
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"is {width} x {height} pixels: send one that has some", "size")
    if width * height > MAX_SOURCE_PIXELS:
        raise ImageError(
            f"is {width} x {height} pixels, at most {MAX_SOURCE_PIXELS} in all are decoded: "
            "make it smaller",
            "size",
        )
    return image


def pixels(image: Image, width: int, height: int) -> Image:
    """The image as RGB of this size, upright; if that turns it sideways, height by width.

    Transparency is laid on white.  Raises ImageError.
    """
    from PIL.Image import Resampling

    name = _format(image)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
            turn = _orientation(image)
            image = _upright(_rgb(image), turn)
            size = (height, width) if turn in SIDEWAYS else (width, height)
            return image if image.size == size else image.resize(size, Resampling.BICUBIC)
    except MemoryError:
        raise ImageError("takes too much memory to decode: make it smaller", "size") from None
    except Exception as error:  # as above
        raise ImageError(_damaged(name, error), "damaged") from None


def _format(image: Image) -> str:
    # A JPEG with further pictures behind the first, as cameras make them.
    return "JPEG" if image.format == "MPO" else str(image.format)


def _check_type(declared: str, found: str) -> None:
    known = {media: name for name, types in MEDIA_TYPES.items() for media in types}
    if not declared or declared in MEDIA_TYPES[found]:
        return
    usual = MEDIA_TYPES[found][0]
    what = "declare what it is" if declared in known else "declare that"
    error = f"is declared as {declared[:60]}, its bytes are {usual}: {what}"
    raise ImageError(error, "format")


def _unknown(data: bytes) -> str:
    head = data[:64]
    guess = next((name for mark, name in SIGNATURES.items() if head.startswith(mark)), None)
    if head[:4] == b"RIFF" and head[8:12] not in (b"WEBP", b""):
        guess = "sound or video"
    if head[4:8] == b"ftyp":
        guess = BRANDS.get(head[8:11], "video")
    text = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml")):
        guess = "an SVG drawing"
    elif text.startswith((b"<!doctype html", b"<html", b"<head", b"<script")):
        guess = "an HTML page"
    elif _seems(head):
        return f"begins as {_seems(head)} and is damaged or cut off: send the whole file"
    found = "its bytes are none of these" if guess is None else f"it is {guess}"
    return f"is no image in {FORMATS}: {found}"


def _seems(head: bytes) -> str | None:
    """The format that the first bytes are of, for a file that its parser did not take."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    marks = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF8": "GIF", b"BM": "BMP"}
    return next((name for mark, name in marks.items() if head.startswith(mark)), None)


def _damaged(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return (
        f"cannot be decoded as {name} ({reason}): it is damaged or cut off; send the whole file, "
        "or save it anew"
    )


def _orientation(image: Image) -> int:
    """EXIF's: how the camera was held; 1 is upright, and so is one that cannot be read."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # metadata may be anything; the picture is there
        return 1


def _upright(image: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _rgb(image: Image) -> Image:
    from PIL import Image as module

    if image.mode in ("I", "I;16", "I;16L", "I;16B"):
        # Of 16 bits: converting it would cut everything above 255.  Its transparency is one
        # level of grey, which is lost with the lower byte.
        grey = image.convert("I").point(lambda level: level * (1 / 256))
        return grey.convert("L").convert("RGB")
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        white = module.new("RGBA", layered.size, (255, 255, 255, 255))
        return module.alpha_composite(white, layered).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def answer(args: DecodeArgs, data: bytes) -> tuple[DecodeResult, bytes]:
    try:
        image = inspect(data, args.declared)
        if not args.width:
            return DecodeResult(width=image.width, height=image.height), b""
        found = pixels(image, args.width, args.height)
        raw = found.tobytes()
        digest = hashlib.sha256(f"{found.width}x{found.height}:".encode() + raw).digest()
        return DecodeResult("", found.width, found.height, len(raw), digest), raw
    except ImageError as error:
        return DecodeResult(str(error), cause=error.cause), b""
    except MemoryError:
        return DecodeResult("takes too much memory to decode: make it smaller", cause="size"), b""


def _read(stdin: BinaryIO, size: int) -> bytes:
    """Raises EOFError."""
    data = stdin.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer requests until stdin ends."""
    while True:
        length = int.from_bytes(_read(stdin, 4), "little")
        args = msgspec.msgpack.decode(_read(stdin, length), type=DecodeArgs)
        data = _read(stdin, args.num_bytes)
        # Time on a core: whether an image is taken does not depend on what else runs.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends this process
        result, raw = answer(args, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        head = msgspec.msgpack.encode(result)
        for part in (len(head).to_bytes(4, "little"), head, raw):
            stdout.write(part)
        stdout.flush()
        del args, data, result, raw  # an idle process keeps no image


def main() -> None:
    from PIL import Image

    for name in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "WebP"):
        import_module(f"PIL.{name}ImagePlugin")  # else the first image would load all there are
    Image.MAX_IMAGE_PIXELS = None  # `inspect` checks, and says the numbers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes no file
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    stdout.write(b"\n")  # ready
    stdout.flush()
    with contextlib.suppress(EOFError):
        serve(stdin, stdout)


if __name__ == "__main__":
    main()
