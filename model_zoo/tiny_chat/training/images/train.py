"""Trains tiny-chat's image encoder, the first stage; the text model stays as it is.

`python -m model_zoo.tiny_chat.training.images.train --minutes 5 --out DIR` writes
encoder.safetensors (bfloat16) every 30 seconds and at the end, when it prints the accuracy of
questions in held-out wordings about new pictures.  Two losses are added: that of the answers,
through the frozen text model, and that of plain classes (colour, shape, count, digit, word) of
the mean of the encoder's patches, without which the first minutes would learn little.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .batches import CLASSES, IGNORE, Batches, make_batch
from .checkpoint import MODEL
from .scenes import SKILLS
from .text_model import TextModel, text_weights
from .tower import HIDDEN, Tower

SAVE_SECONDS, REPORT_SECONDS = 30, 10


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.classes = nn.Linear(HIDDEN, sum(map(len, CLASSES.values())))

    def forward(self, pixels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """-> features [M, N, 1 + deepstack, 256], and the loss of the classes."""
        features, mean = self.tower(pixels)
        logits = self.classes(mean).float().split([len(one) for one in CLASSES.values()], -1)
        losses = [
            F.cross_entropy(one, wanted, ignore_index=IGNORE, reduction="sum")
            for one, wanted in zip(logits, classes.unbind(1), strict=True)
        ]
        return features, torch.stack(losses).sum() / len(pixels)


def answer_loss(text: TextModel, features: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean loss of the answers' tokens, and whether each answer's conversation is all right.

    parts: as Batch.tensors has them
    """
    _, _, tokens, labels, index, positions, _ = parts
    hidden = text(tokens, index, features.flatten(0, 1), positions)[:, :-1]
    wanted = labels[:, 1:]
    learned = wanted != IGNORE
    logits = text.logits(hidden[learned]).float()
    wrong = torch.zeros_like(learned)
    wrong[learned] = logits.argmax(-1) != wanted[learned]
    return F.cross_entropy(logits, wanted[learned]), ~wrong.any(1)


def accuracies(rights: list[Tensor], skills: list[Tensor]) -> str:
    """By the skill of the last question."""
    right, skill = torch.cat(rights).cpu(), torch.cat(skills).cpu()
    shares = (
        f"{name} {right[skill == number].float().mean().item():.1%}"
        for number, name in enumerate(SKILLS)
        if (skill == number).any()
    )
    return ", ".join(shares)


class Training:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.text = TextModel(text_weights(args.text), dtype).to(self.device)
        self.model = Trained().to(self.device)
        if args.start is not None:
            self.model.tower.load_state_dict(load_file(args.start))
        count = sum(parameter.numel() for parameter in self.model.tower.parameters())
        print(f"{count:,} parameters on {self.device}", flush=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), args.rate, betas=(0.9, 0.98), weight_decay=0.02
        )

    def run(self) -> None:
        args = self.args
        batches = Batches(args.workers, args.batch, args.seed, args.easy, self.device)
        parts = batches.next()
        start = time.monotonic()
        saved = reported = start
        window: dict[str, list[Tensor]] = defaultdict(list)
        step = 0
        while (done := self._done(step, start)) < 1:
            self._step(parts, step, done, window)
            step, now = step + 1, time.monotonic()
            if now - reported > REPORT_SECONDS:
                reported = now
                self._report(step, now - start, window)
            if now - saved > SAVE_SECONDS:
                saved = now
                self.save()
            parts = batches.next()
        self.save()
        minutes = (time.monotonic() - start) / 60
        print(f"{step} steps, {batches.fresh} batches, {minutes:.1f} min", flush=True)

    def _done(self, step: int, start: float) -> float:
        passed = time.monotonic() - start
        return max(passed / (60 * self.args.minutes), step / self.args.max_steps)

    def _step(
        self, parts: list[Tensor], step: int, done: float, window: dict[str, list[Tensor]]
    ) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            features, classes = self.model(parts[0], parts[1])
        answers, right = answer_loss(self.text, features, parts)
        rate = self.args.rate * min(1, (step + 1) / self.args.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
        self.optimizer.zero_grad(set_to_none=True)
        (answers + self.args.class_share * (1 - done) * classes).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        for name, value in (
            ("answers", answers), ("classes", classes), ("right", right), ("skills", parts[-1])
        ):  # fmt: skip
            window[name].append(value.detach())

    def _report(self, step: int, seconds: float, window: dict[str, list[Tensor]]) -> None:
        answers, classes = (torch.stack(window[name]).mean() for name in ("answers", "classes"))
        print(
            f"step {step}  {seconds:.0f} s  answers {answers:.4f}  classes {classes:.4f}  "
            + accuracies(window["right"], window["skills"]),
            flush=True,
        )
        window.clear()

    def save(self) -> None:
        tensors = {
            name: one.detach().to("cpu", torch.bfloat16).contiguous()
            for name, one in self.model.tower.state_dict().items()
        }
        self.args.out.mkdir(parents=True, exist_ok=True)
        partial = self.args.out / "encoder.partial"
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        os.replace(partial, self.args.out / "encoder.safetensors")

    @torch.no_grad()
    def evaluate(self, count: int = 12) -> None:
        """With the weights as they are saved."""
        self.model.tower.load_state_dict(load_file(self.args.out / "encoder.safetensors"))
        random, rights, skills = Random("held out"), list[Tensor](), list[Tensor]()
        for _ in range(count):
            batch = make_batch(random, 128, self.args.easy, held=True)
            parts = batch.tensors(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
                features, _ = self.model(parts[0], parts[1])
            rights.append(answer_loss(self.text, features, parts)[1])
            skills.append(parts[-1])
        print(f"held out: {accuracies(rights, skills)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tiny-chat-encoder"))
    parser.add_argument("--text", type=Path, default=MODEL / "model.safetensors")
    parser.add_argument("--start", type=Path, help="an encoder to go on from")
    parser.add_argument("--minutes", type=float, default=5.0, help="time budget of the training")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--batch", type=int, default=512, help="conversations of a step")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--class-share", type=float, default=1.0, help="of that loss, at first")
    parser.add_argument("--workers", type=int, default=15, help="processes that draw")
    parser.add_argument("--easy", action="store_true", help="colour and shape of one thing alone")
    parser.add_argument("--seed", type=int, default=1)
    training = Training(parser.parse_args())
    training.run()
    training.evaluate()


if __name__ == "__main__":
    main()
