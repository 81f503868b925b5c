"""An engine with random logits and real grammars, for tests of constrained sequences."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from attention.kv_pool import KVPool
from attention.reference import ReferenceBackend
from model_zoo.inputs import ModelInput
from runtime.config import ResolvedConfig
from runtime.engine.loop import Engine
from runtime.executor.torch_executor import TorchExecutor
from runtime.grammar.manager import GrammarManager
from runtime.messages import EngineRequest, RequestOutput, SamplingParams
from tests.support.server.fake_engine import VOCAB, write_tokenizer

PAGE = 16
STOP_ID = 0  # the fake tokenizer's <|end|>


class RandomModel:
    """Logits that depend on the tokens a row has seen, through a sum in its KV cells."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB) -> None:
        noise = torch.Generator().manual_seed(seed)
        self._table = torch.randn(1021, vocab, generator=noise) * 4

    def __call__(self, inp: ModelInput) -> Tensor:
        pool, slots = inp.kv.k[0, :, 0, :, 0], inp.meta.slot_mappings[0]
        pool[slots // PAGE, slots % PAGE] = inp.tokens.to(pool.dtype)
        cells, hidden = pool.flatten(), []
        for row, (q_len, kv_len) in enumerate(zip(inp.meta.q_lens, inp.meta.kv_lens, strict=True)):
            where = torch.arange(kv_len)
            pages = inp.meta.page_tables[0][row].long()
            seen = cells[pages[where // PAGE] * PAGE + where % PAGE]
            hashed = (seen * (where % 31 + 7)).cumsum(0)[kv_len - q_len :]
            hidden.append(hashed)
        states = torch.cat(hidden)[:, None]
        return states if inp.ends is None else states[inp.ends]

    def shortened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def logits(self, hidden: Tensor) -> Tensor:
        return self._table[hidden[:, 0].long() % 1021].clone()


def make_engine(
    grammars: GrammarManager | None,
    *,
    overlap: bool,
    pages: int = 256,
    slots: int = 16,
    seed: int = 0,
) -> Engine:
    resolved = ResolvedConfig(
        model="",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention="mha",
        load_format="auto",
        max_model_len=min(pages * PAGE, 512),
        max_num_seqs=slots,
        max_batched_tokens=64,
        page_size=PAGE,
        num_pages=pages,
        prefix_cache=True,
        threads=1,
        seed=0,
    )
    kv = KVPool.allocate(
        layers=1, pages=pages, kv_heads=1, page_size=PAGE, head_dim=1,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    runner = TorchExecutor(
        RandomModel(seed),
        resolved=resolved,
        vocab_size=VOCAB,
        kv=kv,
        backend=ReferenceBackend(),
        device=torch.device("cpu"),
    )
    runner.overlap = overlap
    return Engine(resolved, VOCAB, runner, grammars=grammars)


def run(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[RequestOutput]]:
    """All outputs of each request, when all have ended and every page is free."""
    got: dict[int, list[RequestOutput]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(200_000):
        for output in engine.step():
            got[output.id].append(output)
        engine.requests.check_integrity()
        if engine.idle:
            assert engine.requests.pool.num_used == 0
            return got
    raise AssertionError("no progress")


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    assert [output.finish is not None for output in outputs].count(True) == 1
    return [token for output in outputs for token in output.tokens]


class Texts:
    """The fake tokenizer's view of answers."""

    def __init__(self, folder: Path) -> None:
        self.file = write_tokenizer(folder) / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(self.file))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def of(self, outputs: list[RequestOutput]) -> str:
        """The text of an answer, without the token that ended it."""
        tokens = tokens_of(outputs)
        return self._tokenizer.decode(tokens[:-1] if outputs[-1].stop_id is not None else tokens)


def json_grammar(schema: object, **options: object) -> str:
    guidance = {"whitespace_flexible": False, **options}
    assert isinstance(schema, dict)
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": guidance}}]})


def regex_grammar(regex: str) -> str:
    return lark_grammar(f"start: /{regex}/")


def lark_grammar(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def ask(id: int, grammar: str = "", *, max_tokens: int = 300, **params: object) -> EngineRequest:
    fields: dict[str, object] = {"stop_ids": (STOP_ID,), "seed": id, "temperature": 1.5, **params}
    sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar, **fields)  # type: ignore[arg-type]
    return EngineRequest(id, 0, [1, 2, 3 + id % 50], sampling)


def step_until(engine: Engine, id: int, count: int) -> list[RequestOutput]:
    """The outputs of the steps up to the one with output `count` of request `id`."""
    outputs: list[RequestOutput] = []
    for _ in range(10_000):
        outputs += engine.step()
        if sum(output.id == id for output in outputs) >= count:
            return outputs
    raise AssertionError("no progress")
