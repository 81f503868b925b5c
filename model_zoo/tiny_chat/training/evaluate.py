"""Held-out accuracy of tiny-chat by skill: exact match of the whole answer.

`python -m model_zoo.tiny_chat.training.evaluate [DIR]` prints a Markdown table, and with `--readme`
writes it between the markers of this folder's README.md.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from .data import ChatMessage, questions
from .dialogs import KINDS, Dialog, held_dialogs
from .rendering import answer_text

MODEL = Path(__file__).parent.parent
HELD_OUT = {
    "small talk": "phrasings",
    "facts": "phrasings",
    "sum": "pairs of numbers, half of them in held-out phrasings",
    "capital": "phrasings",
    "count": "first and last number, half in held-out phrasings",
    "repeat": "words, half in held-out phrasings",
    "name": "names, half in held-out phrasings",
    "unknown": "phrasings and subjects",
    "mixed turns": "the last of 2-5 turns, as above",
    "tool call": "names of function and parameters, words, half in held-out phrasings",
    "tool result": "the same; what is said after the result",
    "tool turns": "the same; the turn after that, a call or a plain answer",
    "no tool": "questions as above, or requests that no offered function is for",
    "JSON": "keys, names and places, half in held-out phrasings",
    "thinking": "numbers, half in held-out phrasings; the answer counts, not the thought",
}
MARKERS = re.compile(r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)", re.DOTALL)


def load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """With the image encoder if the directory has one: it changes nothing without images."""
    has_encoder = (directory / "preprocessor_config.json").is_file()
    kind = AutoModelForImageTextToText if has_encoder else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=dtype)


def prompt_text(tokenizer: PreTrainedTokenizerFast, prompt: list[ChatMessage] | Dialog) -> str:
    dialog = prompt if isinstance(prompt, Dialog) else Dialog([*prompt, {"role": "assistant"}])
    return tokenizer.apply_chat_template(
        dialog.messages[:-1],
        tools=dialog.tools or None,
        enable_thinking=dialog.thinking,
        tokenize=False,
        add_generation_prompt=True,
    )


@torch.inference_mode()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[ChatMessage] | Dialog],
    temperature: float = 0.0,
    batch_size: int = 250,
) -> list[str]:
    """What the model says next in each conversation; of a Dialog its last message is left out."""
    texts = [prompt_text(tokenizer, prompt) for prompt in prompts]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    said: list[str] = []
    for start in range(0, len(texts), batch_size):
        rows = tokenizer(
            texts[start : start + batch_size],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        ).to(model.device)
        ids = model.generate(
            input_ids=rows["input_ids"],
            attention_mask=rows["attention_mask"],
            max_new_tokens=420,
            **(sampling or {"do_sample": False}),
        )
        new = ids[:, rows["input_ids"].shape[1] :]
        said += tokenizer.batch_decode(new, skip_special_tokens=True)
    return said


def asked_of(skill: str, count: int) -> list[Dialog]:
    if skill in KINDS:
        return held_dialogs(skill, count)
    return [Dialog(messages) for messages in questions(skill, count)]


def is_right(dialog: Dialog, said: str) -> bool:
    """Whether every letter is; of a thought only that it ends."""
    if dialog.thinking:
        _, closed, said = said.partition("</think>\n\n")
        if not closed:
            return False
    return said == answer_text(dialog.messages[-1])


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    skill: str,
    count: int,
    temperature: float,
    show: int,
) -> float:
    asked = asked_of(skill, count)
    said = answers(model, tokenizer, asked, temperature, 100 if skill in KINDS else 250)
    wrong = [
        (dialog.messages, answer)
        for dialog, answer in zip(asked, said, strict=True)
        if not is_right(dialog, answer)
    ]
    for messages, answer in wrong[:show]:
        wanted = answer_text(messages[-1])
        print(f"  {skill}: {messages[-2]['content']!r} -> {answer[:200]!r}, not {wanted[:200]!r}")
    return 1 - len(wrong) / count


def table(rows: list[tuple[str, float, float]], count: int) -> str:
    lines = [
        f"| skill | held out | greedy | temperature 0.7 | questions |\n{'|---' * 2}|--:|--:|--:|"
    ]
    for skill, greedy, sampled in rows:
        lines.append(f"| {skill} | {HELD_OUT[skill]} | {greedy:.1%} | {sampled:.1%} | {count} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--count", type=int, default=1000, help="questions a skill")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print a skill")
    parser.add_argument("--quick", action="store_true", help="greedy only, and no table")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    args = parser.parse_args()
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = load(args.directory, torch.bfloat16)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    rows: list[tuple[str, float, float]] = []
    for skill in HELD_OUT:
        greedy = accuracy(model, tokenizer, skill, args.count, 0.0, args.show)
        if args.quick:
            print(f"{skill}: {greedy:.1%}", flush=True)
            continue
        rows.append((skill, greedy, accuracy(model, tokenizer, skill, args.count, 0.7, 0)))
        print(f"{skill}: {greedy:.1%} {rows[-1][2]:.1%}", flush=True)
    if args.quick:
        return
    written = table(rows, args.count)
    print(written)
    if args.readme:
        readme = MODEL / "README.md"
        text = readme.read_text(encoding="utf-8")
        readme.write_text(MARKERS.sub(rf"\1{written}\2", text), encoding="utf-8")


if __name__ == "__main__":
    main()
