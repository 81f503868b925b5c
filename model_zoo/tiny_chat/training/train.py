"""Trains tiny-chat's text model on conversations that worker processes keep generating.

`python -m model_zoo.tiny_chat.training.train --minutes 8 --out DIR` writes config.json and
model.safetensors (bfloat16) of a model without images, to which `training.images` adds an encoder.
The tokenizer of this folder must exist. No example is seen twice on purpose: the data has no end,
the time budget sets the length of the cosine.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from .data import conversation, plain_text
from .dialogs import SHARES, Dialog, dialog
from .rendering import segments_of
from .tokenizer import VOCAB_SIZE

MODEL = Path(__file__).parent.parent  # what is shipped
BUCKETS = (64, 128, 192, 256, 384, 512, 1024, 2048)  # padded lengths; batches have one length each
PLAIN_SHARE = 0.03
IGNORE = -100
PackedRows = list[tuple[list[int], list[int]]]


def config_of_model() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        attention_dropout=0.0,
    )


def example(random: Random) -> list[tuple[str, bool]]:
    """One example in pieces; True marks what the model must learn to write."""
    if random.random() < PLAIN_SHARE:
        beginning, rest = plain_text(random)
        return [(beginning, False), (rest + "<|endoftext|>", True)]
    kinds, shares = [*SHARES, ""], [*SHARES.values(), 1 - sum(SHARES.values())]
    if kind := random.choices(kinds, shares)[0]:
        return segments_of(dialog(random, kind))
    return segments_of(Dialog(conversation(random)))


def make_rows(tokenizer: Tokenizer, random: Random, count: int) -> PackedRows:
    """`count` examples as (tokens, labels); labels are IGNORE where nothing is learned."""
    examples = [example(random) for _ in range(count)]
    encoded = iter(tokenizer.encode_batch([text for segments in examples for text, _ in segments]))
    rows: PackedRows = []
    for segments in examples:
        tokens: list[int] = []
        labels: list[int] = []
        for _, learned in segments:
            ids = next(encoded).ids
            tokens += ids
            labels += ids if learned else [IGNORE] * len(ids)
        rows.append((tokens, labels))
    return rows


def pack(rows: PackedRows, length: int) -> Tensor:
    """[2, B, length] int16: tokens and labels, padded on the right."""
    packed = torch.full((2, len(rows), length), IGNORE, dtype=torch.int16)
    packed[0] = 0
    for index, (tokens, labels) in enumerate(rows):
        packed[0, index, : len(tokens)] = torch.tensor(tokens, dtype=torch.int16)
        packed[1, index, : len(labels)] = torch.tensor(labels, dtype=torch.int16)
    return packed


def produce(queue: Any, seed: int, tokens_per_batch: int) -> None:
    """Worker process: put batches of one padded length each, for ever."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    random = Random(seed)
    waiting: dict[int, PackedRows] = {length: [] for length in BUCKETS}
    while True:
        for row in make_rows(tokenizer, random, 1000):
            length = next((size for size in BUCKETS if len(row[0]) <= size), None)
            if length is None:
                continue
            waiting[length].append(row)
            if len(waiting[length]) * length >= tokens_per_batch:
                queue.put(pack(waiting[length], length).numpy())
                waiting[length] = []


def batches(num_workers: int, tokens_per_batch: int, seed: int) -> Iterator[Tensor]:
    context = get_context("spawn")
    queue = context.Queue(maxsize=4 * num_workers)
    workers = [
        context.Process(target=produce, args=(queue, seed + i, tokens_per_batch), daemon=True)
        for i in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    while True:
        try:
            yield torch.from_numpy(queue.get(timeout=60))
        except Empty:
            raise RuntimeError("the data workers delivered nothing for 60 s") from None


def loss_of(model: Qwen3ForCausalLM, batch: Tensor) -> Tensor:
    """Mean cross entropy of the learned tokens; logits exist for those only."""
    # Rows are padded on the right and causal, so padding is never seen: no mask is needed.
    mask = {"full_attention": None}
    hidden = model.model(input_ids=batch[0], attention_mask=mask, use_cache=False)[0]
    targets = batch[1, :, 1:]
    learned = targets != IGNORE
    logits = model.lm_head(hidden[:, :-1][learned])
    return torch.nn.functional.cross_entropy(logits.float(), targets[learned])


def optimizer_of(model: Qwen3ForCausalLM, rate: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """config.json as transformers writes it; weights in bfloat16, tied head left out."""
    out.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen3ForCausalLM(config_of_model()).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    optimizer = optimizer_of(model, args.rate)
    if device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    stream = batches(args.workers, args.batch_tokens, args.seed)
    start = report = time.monotonic()
    tokens = step = 0
    recent: list[Tensor] = []
    for batch in stream:
        done = max((time.monotonic() - start) / (60 * args.minutes), step / args.max_steps)
        if done >= 1:
            break
        warmup = min(1.0, (step + 1) / 300)
        rate = args.rate * warmup * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, batch.to(device, torch.long))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.detach())
        step, tokens = step + 1, tokens + batch[0].numel()
        if time.monotonic() - report > 10 or step == args.max_steps:
            report, mean = time.monotonic(), torch.stack(recent).mean().item()
            recent.clear()
            speed = tokens / (report - start) / 1e6
            print(f"step {step}  loss {mean:.4f}  lr {rate:.2e}  {speed:.2f} Mtok/s", flush=True)
    save(model, args.out)
    print(f"{step} steps, {tokens / 1e6:.0f} M tokens, {(time.monotonic() - start) / 60:.1f} min")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tiny-chat-text"))
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget of the training")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--batch-tokens", type=int, default=49152)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--workers", type=int, default=14, help="data processes")
    parser.add_argument("--seed", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
