"""Files that are no images, or broken ones, in the process that decodes: an error says what is
wrong, and the process is there for the next.
"""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial

import psutil
import pytest
from PIL import Image

from server.errors import Unavailable
from server.images.decode_worker import CPU_SECONDS, MAX_MEMORY, DecodeArgs
from server.images.decoder import DecodeProcess, ImageDecoder
from server.images.image_error import ImageError
from tests.support.images.pictures import BadImage, bad_images, encoded, noise

BAD = bad_images()
SEEDS = 400  # of each format


@pytest.fixture(scope="module")
def process() -> Iterator[DecodeProcess]:
    process = DecodeProcess()
    yield process
    process.end()


@pytest.fixture
async def decoder() -> AsyncIterator[ImageDecoder]:
    decoder = ImageDecoder()
    yield decoder
    decoder.close()


def refusal(process: DecodeProcess, data: bytes, declared: str = "") -> str:
    """Of its size, or then of its pixels; "" if it is taken."""
    result, _ = process.ask(DecodeArgs(len(data), declared), data, 20)
    if not result.error:
        args = DecodeArgs(len(data), declared, 64, 32)
        result, raw = process.ask(args, data, 20)
        assert len(raw) == (0 if result.error else 64 * 32 * 3)
    return result.error


def test_there_are_enough_of_them() -> None:
    assert len(BAD) >= 100
    assert len({bad.name for bad in BAD}) == len(BAD)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_image_is_refused_with_what_is_wrong(process: DecodeProcess, bad: BadImage) -> None:
    error = refusal(process, bad.data, bad.declared)
    assert any(words in error for words in bad.words.split("|")), error
    assert len(error) < 400 and "\n" not in error and "0x" not in error
    assert process.runs()


def test_bad_images_leave_no_memory_behind(process: DecodeProcess) -> None:
    memory = psutil.Process(process._process.pid)
    for bad in BAD:
        refusal(process, bad.data)
    before = memory.memory_info().rss
    for _ in range(5):
        for bad in BAD:
            refusal(process, bad.data)
    assert memory.memory_info().rss < before + (16 << 20)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_files_are_refused_or_decoded_and_nothing_else(
    process: DecodeProcess, format: str
) -> None:
    picture = noise(48, 40)
    whole = encoded(picture.quantize(8) if format == "GIF" else picture, format)
    refused = 0
    for seed in range(SEEDS):
        chance = random.Random(f"{format}{seed}")
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(data))
            kind = chance.randrange(4)
            if kind == 0:
                data[place] = chance.randrange(256)
            elif kind == 1:
                del data[place : place + chance.randrange(1, 40)]
            elif kind == 2:
                data[place:place] = chance.randbytes(chance.randrange(1, 40))
            else:
                data[: place // 8] = whole[: place // 8]
                del data[max(place, 16) :]
            if not data:
                break
        refused += bool(refusal(process, bytes(data)))
        assert process.runs(), seed
    assert refused > 0


async def test_an_image_that_ends_its_process_is_refused_and_the_next_is_decoded(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encoded(noise(64, 32))
    assert await decoder.size(whole) == (64, 32)
    [process] = decoder._idle

    def die(*args: object) -> None:
        process._process.send_signal(signal.SIGSEGV)

    monkeypatch.setattr(process, "_write", die)
    with pytest.raises(ImageError, match="ended the process that decoded it"):
        await decoder.size(whole)
    result, raw = await decoder.pixels(whole, 64, 32)
    assert (result.width, result.height) == (64, 32) and raw == noise(64, 32).tobytes()


async def test_an_image_whose_process_is_killed_is_decoded_by_another_one(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encoded(noise(64, 32))

    def die(process: DecodeProcess, *args: object) -> None:
        process._process.kill()

    await decoder.size(whole)
    [process] = decoder._idle
    monkeypatch.setattr(process, "_write", partial(die, process))
    assert await decoder.size(whole) == (64, 32)
    monkeypatch.setattr(DecodeProcess, "_write", die)
    with pytest.raises(Unavailable, match="the process that decodes images was killed"):
        await decoder.size(whole)


async def test_an_image_that_is_not_decoded_in_time_is_refused_and_its_process_ends() -> None:
    decoder = ImageDecoder(seconds=0.5)
    whole = encoded(noise(64, 32))
    await decoder.size(whole)
    [process] = decoder._idle
    psutil.Process(process._process.pid).suspend()
    with pytest.raises(ImageError, match="not decoded after"):
        await decoder.size(whole)
    assert not process.runs()
    assert await decoder.size(whole) == (64, 32)
    decoder.close()


@pytest.mark.slow
async def test_an_image_that_takes_too_long_on_a_core_is_refused(decoder: ImageDecoder) -> None:
    whole = encoded(Image.new("L", (8000, 8000), 127), "JPEG", progressive=True)
    end = whole.rindex(b"\xff\xd9")
    last_scan = whole[whole.rindex(b"\xff\xda") : end]
    slow = whole[:end] + last_scan * 1000 + whole[end:]
    assert await decoder.size(slow) == (8000, 8000)
    with pytest.raises(ImageError, match=f"takes over {CPU_SECONDS:g} s to decode"):
        await decoder.pixels(slow, 64, 64)
    assert await decoder.pixels(encoded(noise(64, 32)), 64, 32)


async def test_an_idle_process_that_ended_is_replaced(decoder: ImageDecoder) -> None:
    whole = encoded(noise(64, 32))
    await decoder.size(whole)
    [process] = decoder._idle
    process._process.kill()
    process._process.wait()
    assert await decoder.size(whole) == (64, 32)


def test_the_process_has_limits_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVEFILL_API_KEY", "secret")
    process = DecodeProcess()
    found = psutil.Process(process._process.pid)
    assert found.rlimit(psutil.RLIMIT_AS) == (MAX_MEMORY, MAX_MEMORY)
    assert found.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert "WAVEFILL_API_KEY" not in found.environ()
    assert process.end() != 0
    assert not psutil.pid_exists(found.pid)
