"""Held-out accuracy of tiny-chat by skill: exact match of the whole answer.

`python -m model_zoo.tiny_chat.evaluate [DIR]` prints a Markdown table, and with `--readme` writes
it between the markers of this folder's README.md.
"""

import argparse
import re
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from .data import Message, questions
from .skills import SKILLS

HERE = Path(__file__).parent
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
}
MARKERS = re.compile(r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)", re.DOTALL)


@torch.inference_mode()
def answers(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[Message]],
    temperature: float = 0.0,
    batch_size: int = 250,
) -> list[str]:
    """What the model says next in each conversation."""
    texts = [
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
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


def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    skill: str,
    count: int,
    temperature: float,
    show: int,
) -> float:
    asked = questions(skill, count)
    said = answers(model, tokenizer, [messages[:-1] for messages in asked], temperature)
    wrong = [
        (messages, answer)
        for messages, answer in zip(asked, said, strict=True)
        if answer != messages[-1]["content"]
    ]
    for messages, answer in wrong[:show]:
        print(f"  {skill}: {messages[-2]['content']!r} -> {answer[:110]!r}")
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
    parser.add_argument("directory", type=Path, nargs="?", default=HERE)
    parser.add_argument("--count", type=int, default=1000, help="questions a skill")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print a skill")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    args = parser.parse_args()
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    model = Qwen3ForCausalLM.from_pretrained(args.directory, dtype=torch.bfloat16)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    rows: list[tuple[str, float, float]] = []
    for skill in (*SKILLS, "mixed turns"):
        greedy = accuracy(model, tokenizer, skill, args.count, 0.0, args.show)
        rows.append((skill, greedy, accuracy(model, tokenizer, skill, args.count, 0.7, 0)))
        print(f"{skill}: {greedy:.1%} {rows[-1][2]:.1%}", flush=True)
    written = table(rows, args.count)
    print(written)
    if args.readme:
        readme = HERE / "README.md"
        text = readme.read_text(encoding="utf-8")
        readme.write_text(MARKERS.sub(rf"\1{written}\2", text), encoding="utf-8")


if __name__ == "__main__":
    main()
