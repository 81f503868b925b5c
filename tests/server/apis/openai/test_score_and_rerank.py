"""Score and rerank: what is sent to the engine and what callers get."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import FakeServer


def ask(fake: FakeServer, route: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{fake.url}{route}", json={"model": "fake", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def embed(fake: FakeServer, text: Any = "The quick brown fox", **fields: Any) -> list[list[float]]:
    answer = ask(fake, "/v1/embeddings", input=text, **fields)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


def test_score_compares_one_text_with_many(fake: FakeServer):
    answer = ask(fake, "/v1/score", text_1="fox", text_2=["fox", "dog"], pooling="mean")
    assert answer["object"] == "list" and answer["model"] == "fake"
    assert answer["id"].startswith("score-")
    scores = [entry["score"] for entry in answer["data"]]
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [
        (0, "score"),
        (1, "score"),
    ]
    assert scores[0] == pytest.approx(1) and -1 <= scores[1] < 1
    assert len(fake.engine.requests) == 3
    assert answer["usage"]["prompt_tokens"] == sum(len(r.tokens) for r in fake.engine.requests)


@pytest.mark.parametrize(
    ("first", "second"), [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")]
)
def test_score_compares_pair_by_pair_under_all_names(fake: FakeServer, first: str, second: str):
    ones, others = ["fox dog", "lazy"], ["dog fox", "quick"]
    answer = ask(fake, "/score", **{first: ones, second: others}, pooling="mean")
    a, b = embed(fake, ones, pooling="mean"), embed(fake, others, pooling="mean")
    expected = [sum(x * y for x, y in zip(*pair, strict=True)) for pair in zip(a, b, strict=True)]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(expected)


def test_equal_texts_score_no_more_than_one(fake: FakeServer):
    text = "The quick brown fox jumps over the lazy dog"
    [entry] = ask(fake, "/v1/score", text_1=text, text_2=text, pooling="mean")["data"]
    assert 0.999999 < entry["score"] <= 1


# Rerank.

DOCUMENTS = ["0123456789", "The quick fox", {"text": "the lazy dog"}, "fox"]


@pytest.mark.parametrize("route", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_puts_what_is_most_alike_first(fake: FakeServer, route: str):
    answer = ask(fake, route, query="fox", documents=DOCUMENTS, pooling="mean")
    results = answer["results"]
    assert results[0]["index"] == 3 and results[0]["relevance_score"] == pytest.approx(1)
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    texts = {result["index"]: result["document"]["text"] for result in results}
    assert texts == {0: "0123456789", 1: "The quick fox", 2: "the lazy dog", 3: "fox"}
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(("top_n", "count"), [(2, 2), (9, 4), (0, 4), (None, 4)])
def test_rerank_returns_the_best_that_were_asked_for(
    fake: FakeServer, top_n: int | None, count: int
):
    results = ask(fake, "/v1/rerank", query="fox", documents=DOCUMENTS, top_n=top_n)["results"]
    assert len(results) == count


def test_rerank_omits_the_texts_if_requested(fake: FakeServer):
    answer = ask(
        fake, "/v1/rerank", query="fox", documents=DOCUMENTS, return_documents=False, top_n=1
    )
    assert set(answer["results"][0]) == {"index", "relevance_score"}


def test_rerank_cuts_documents_at_their_end_and_not_the_query(fake: FakeServer):
    ask(fake, "/v1/rerank", query="The quick fox", documents=["The lazy dog"], max_tokens_per_doc=2)
    query, document = fake.engine.requests
    assert query.tokens == fake.tokenizer.encode("The quick fox")
    assert document.tokens == fake.tokenizer.encode("The lazy dog")[:2]


def test_equal_documents_stay_in_their_order(fake: FakeServer):
    answer = ask(fake, "/v1/rerank", query="fox", documents=["dog"] * 5)
    assert [result["index"] for result in answer["results"]] == [0, 1, 2, 3, 4]
