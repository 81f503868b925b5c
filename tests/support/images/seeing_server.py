"""A real server of a small random Qwen3-VL, with transformers' model of the same weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx2 as httpx
from PIL import Image
from tokenizers import Tokenizer

from runtime.messages import PromptImage
from tests.support.images.vision_server import PAD, TEMPLATE, WORDS
from tests.support.models.tiny_vision import SIDE, library_answer, write_vision_checkpoint
from tests.support.server.fake_engine import write_tokenizer
from tests.support.server.server_process import Server, start_server

STEPS = 12
MODEL = "seeing"


class SeeingServer:
    def __init__(self, folder: Path) -> None:
        directory = write_tokenizer(folder / "model", template=TEMPLATE, special=WORDS)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.pad = self.tokenizer.token_to_id(PAD)
        self.reference = write_vision_checkpoint(
            "qwen3-vl", directory, image_token_id=self.pad,
            vocab_size=self.tokenizer.get_vocab_size(),
        )  # fmt: skip
        arguments = ("--dtype", "float32", "--served-model-name", MODEL, "--kv-tokens", "2048")
        self.server: Server = start_server(folder / "log", str(directory), *arguments)

    def expected(self, messages: list[dict[str, Any]], pictures: list[Image.Image]) -> list[int]:
        """What transformers answers to the tokens that the server counts."""
        body = {"model": MODEL, "messages": messages}
        tokens = httpx.post(f"{self.server.url}/tokenize", json=body).json()["tokens"]
        images: list[PromptImage] = []
        place = 0
        for picture in pictures:
            place = tokens.index(self.pad, place)
            count, pixels = picture.width * picture.height // SIDE**2, picture.tobytes()
            digest = hashlib.sha256(pixels).digest()
            images.append(PromptImage(place, count, picture.width, picture.height, pixels, digest))
            place += count
        assert tokens.count(self.pad) == sum(image.num_tokens for image in images)
        return library_answer(self.reference, tokens, tuple(images), STEPS)

    def answer(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        return self.server.client().chat.completions.create(
            model=MODEL, messages=messages, max_tokens=STEPS, temperature=0,  # type: ignore[arg-type]
            extra_body={"ignore_eos": True, "return_token_ids": True}, **options,
        )  # fmt: skip
