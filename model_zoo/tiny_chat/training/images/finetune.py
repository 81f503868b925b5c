"""Trains the text model to answer from what the image encoder sees: the second stage.

`python -m model_zoo.tiny_chat.training.images.finetune ENCODER --minutes 30 --out DIR` trains the
text model and what joins it to the encoder (the mergers); the encoder's blocks stay as they are.
Each step has conversations about new pictures, and conversations of text whose next tokens are
held to those that the text model gave before, so that it goes on to answer text as it did.  It
writes text.safetensors and encoder.safetensors (bfloat16) every `--report` steps, with the accuracy
of questions in held-out wordings about new pictures.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.tiny_chat.training.train import PackedRows, make_rows, pack

from .batches import IGNORE, make_batch
from .checkpoint import MODEL
from .text_model import TextModel, text_weights
from .tower import Tower
from .train import accuracies, answer_loss

# Few padded lengths, for each of which the layers are compiled; of pictures' with their weights.
PICTURE_LENGTHS = {64: 4, 96: 3, 160: 1}
TEXT_LENGTHS = (96, 192, 384, 1024)
OTHERS = 0.2  # the share of tokens that no answer has, at which the text model is held, too


class Replay:
    """Conversations of the text model's own training, in batches of one padded length."""

    def __init__(self, seed: int, tokens: int) -> None:
        self._random, self._tokens = Random(f"replay {seed}"), tokens
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._waiting: dict[int, PackedRows] = {length: [] for length in TEXT_LENGTHS}

    def next(self) -> tuple[Tensor, Tensor]:
        """tokens, labels [B, T]"""
        while True:
            for length, rows in self._waiting.items():
                if len(rows) * length >= self._tokens:
                    self._waiting[length] = []
                    tokens, labels = pack(rows, length).long()
                    return tokens, labels
            self._fill()

    def _fill(self) -> None:
        for row in make_rows(self._tokenizer, self._random, 1):
            length = next((size for size in TEXT_LENGTHS if len(row[0]) <= size), None)
            if length is not None:
                self._waiting[length].append(row)


def padded(parts: list[Tensor], length: int) -> list[Tensor]:
    """parts: as Batch.tensors has them; all of `length` tokens then."""
    pixels, classes, tokens, labels, index, positions, skills = parts
    more = (0, length - tokens.shape[1])
    tokens, positions = F.pad(tokens, more), F.pad(positions, more)
    labels, index = F.pad(labels, more, value=IGNORE), F.pad(index, more, value=-1)
    return [pixels, classes, tokens, labels, index, positions, skills]


class Finetuning:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args, self.random = args, Random(f"pictures {args.seed}")
        self.replay = Replay(args.seed, args.tokens)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        before = text_weights(args.text)
        start = text_weights(args.start) if args.start is not None else before
        self.before = TextModel(before, torch.bfloat16).to(self.device)
        self.text = TextModel(start, torch.bfloat16, trained=True).to(self.device)
        if args.compile:
            torch._dynamo.config.recompile_limit = 64
            compiled = torch.compile(self.text.block, dynamic=False)
            self.before.block = self.text.block = compiled
        self.tower = Tower().to(self.device)
        self.tower.load_state_dict(load_file(args.encoder))
        self.tower.requires_grad_(False)
        mergers = [self.tower.merger, self.tower.deepstack_merger_list]
        joining = [one.requires_grad_() for part in mergers for one in part.parameters()]
        groups = [
            {"params": list(self.text.parameters()), "peak": args.rate},
            {"params": joining, "peak": args.merger_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
        self.trained = [one for group in groups for one in group["params"]]

    def run(self) -> None:
        args, start = self.args, time.monotonic()
        step, window = 0, list[tuple[float, float]]()
        while True:
            minutes = (time.monotonic() - start) / 60
            done = max(minutes / args.minutes, step / args.max_steps)
            if (step and step % args.report == 0) or done >= 1:
                answers, text = (sum(part) / len(window) for part in zip(*window, strict=True))
                print(f"step {step}  {minutes:.1f} min  answers {answers:.4f}  text {text:.5f}")
                window.clear()
                self.save()
                self.evaluate()
            if done >= 1:
                return
            window.append(self._step(step, done))
            step += 1

    def _step(self, step: int, done: float) -> tuple[float, float]:
        """The losses of pictures and of text."""
        factor = min(1, (step + 1) / self.args.warmup) * (1 + math.cos(math.pi * done)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * (0.01 + 0.99 * factor)
        self.optimizer.zero_grad(set_to_none=True)
        answers = answer_loss(self.text, *self._pictures())[0]
        answers.backward()
        text = self._text_loss(*(one.to(self.device) for one in self.replay.next()))
        (self.args.replay_share * text).backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        return answers.item(), text.item()

    def _pictures(self) -> tuple[Tensor, list[Tensor]]:
        lengths = list(PICTURE_LENGTHS)
        most = self.random.choices(lengths, list(PICTURE_LENGTHS.values()))[0]
        least = max([one for one in lengths if one < most], default=0) + 1
        batch = make_batch(self.random, self.args.tokens // most, least=least, most=most)
        parts = padded(batch.tensors(self.device), most)
        return self._features(parts[0]), parts

    def _features(self, pixels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.tower(pixels)[0]

    def _text_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """KL divergence from what the text model said before, of the answers and of some others."""
        # The token at t + 1 is that of the logits at t; what is behind the last answer is padding.
        answer = F.pad(labels[:, 1:], (0, 1), value=IGNORE) != IGNORE
        inside = answer.flip(1).cumsum(1).flip(1) > 0
        chosen = answer | (inside & (torch.rand(answer.shape, device=self.device) < OTHERS))
        with torch.no_grad():
            wanted = self.before.logits(self.before(tokens)[chosen]).float().log_softmax(-1)
        found = self.text.logits(self.text(tokens)[chosen]).float().log_softmax(-1)
        return F.kl_div(found, wanted, reduction="batchmean", log_target=True)

    def save(self) -> None:
        self.args.out.mkdir(parents=True, exist_ok=True)
        text = {f"model.{name}": getattr(self.text, of) for name, of in self.text.names.items()}
        for file, tensors in (("text", text), ("encoder", self.tower.state_dict())):
            stored = {
                name: one.detach().to("cpu", torch.bfloat16).contiguous()
                for name, one in tensors.items()
            }
            partial = self.args.out / f"{file}.partial"
            save_file(stored, partial, metadata={"format": "pt"})
            os.replace(partial, self.args.out / f"{file}.safetensors")

    @torch.no_grad()
    def evaluate(self, count: int = 4) -> None:
        random, rights, skills = Random("held out"), list[Tensor](), list[Tensor]()
        for _ in range(count):
            parts = make_batch(random, 32, held=True, most=96).tensors(self.device)
            parts = padded(parts, 96)
            rights.append(answer_loss(self.text, self._features(parts[0]), parts)[1])
            skills.append(parts[-1])
        print(f"  held out: {accuracies(rights, skills)}", flush=True)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("encoder", type=Path, help="what the first stage wrote")
    parser.add_argument("--out", type=Path, default=Path("tiny-chat-joint"))
    parser.add_argument("--text", type=Path, default=MODEL / "model.safetensors")
    parser.add_argument("--start", type=Path, help="a text.safetensors to go on from")
    parser.add_argument("--minutes", type=float, default=30.0, help="time budget of the training")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--tokens", type=int, default=3072, help="of a step, for each of the two")
    parser.add_argument("--rate", type=float, default=2.5e-4, help="peak, of the text model")
    parser.add_argument("--merger-rate", type=float, default=2.5e-4, help="peak, of the mergers")
    parser.add_argument("--warmup", type=int, default=30, help="steps")
    parser.add_argument("--replay-share", type=float, default=5.0, help="of the loss of text")
    parser.add_argument("--report", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main() -> None:
    Finetuning(arguments().parse_args()).run()


if __name__ == "__main__":
    main()
