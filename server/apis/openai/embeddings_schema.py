"""Bodies of POST /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field, Tag

from server.apis.openai.completions_schema import Tokens, prompt_tag, prompts_by_path
from server.apis.openai.sampling_schema import LATER, check_truncation
from server.errors import FieldPath, MissingParameter, RequestError
from server.http.validation import Body, Unsupported, by_kind, tagged_union

MAX_TEXTS = 2048  # of one request, as in OpenAI's API

Text = Annotated[str, Field(min_length=1)]
Several = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
Input = Annotated[
    Annotated[Text, Tag("~text")]
    | Annotated[Several, Tag("~texts")]
    | Annotated[Tokens, Tag("~tokens")]
    | Annotated[
        list[Tokens],
        Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS),
        Tag("~token_lists"),
    ],
    tagged_union(prompt_tag, "a string, strings, token ids or lists of token ids"),
]
Texts = Annotated[
    Annotated[Text, Tag("~text")] | Annotated[Several, Tag("~texts")],
    by_kind("a string or an array of strings", string="~text", array="~texts"),
]


class PoolingBody(Body):
    """The fields of every request for embeddings.  null stands for the default."""

    model: str
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    user: str | None = None

    def check(self) -> None:
        """The rules between fields.  Raises RequestError."""
        check_truncation(self.truncate_prompt_tokens, self.truncation_side)


class EmbeddingRequest(PoolingBody):
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    normalize: bool | None = None

    def inputs(self) -> dict[FieldPath, str | list[int]]:
        """Path -> text or token ids, of each embedding."""
        return prompts_by_path("input", self.input)


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


class ScoreRequest(PoolingBody):
    """Two sides, under one of three pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def names(self) -> tuple[str, str]:
        """The names of the two sides that were sent.  Raises RequestError."""
        sent = [pair for pair in SIDES if any(getattr(self, name) is not None for name in pair)]
        if not sent:
            raise MissingParameter("{text_1} is required: send it and {text_2}")
        if len(sent) > 1:
            name = next(name for name in sent[1] if getattr(self, name) is not None)
            raise RequestError(
                "{} is another name of what `{}` and `{}` are: send one pair of names",
                (FieldPath(name), sent[0][0], sent[0][1]),
            )
        for name, other in (sent[0], sent[0][::-1]):
            if getattr(self, name) is None:
                raise MissingParameter(
                    "{} is required beside `{}`: add it", (FieldPath(name), other)
                )
        return sent[0]

    def side(self, name: str) -> dict[FieldPath, str]:
        """Path -> text."""
        texts: str | list[str] = getattr(self, name)
        return cast("dict[FieldPath, str]", prompts_by_path(name, texts))

    def check(self) -> None:
        super().check()
        first, second = self.names()
        ones, others = len(self.side(first)), len(self.side(second))
        if ones not in (1, others):
            raise RequestError(
                "{} has {} texts and {} {}: send one {} for all, or as many as {} has",
                (one := FieldPath(first), ones, other := FieldPath(second), others, one, other),
            )


class Document(Body):
    text: Text


class RerankRequest(PoolingBody):
    query: Text
    documents: Annotated[
        list[
            Annotated[
                Annotated[Text, Tag("~text")] | Annotated[Document, Tag("~object")],
                by_kind("a string or an object with `text`", string="~text", object="~object"),
            ]
        ],
        Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS),
    ]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1)

    def texts(self) -> dict[FieldPath, str]:
        """Path -> text, of each document."""
        return dict(
            (FieldPath("documents", index), entry)
            if isinstance(entry, str)
            else (FieldPath("documents", index, "text"), entry.text)
            for index, entry in enumerate(self.documents)
        )

    def check(self) -> None:
        super().check()
        if self.max_tokens_per_doc is not None and self.truncate_prompt_tokens is not None:
            raise RequestError(
                "{max_tokens_per_doc} and {truncate_prompt_tokens} both say where a document "
                "ends: send one of them"
            )


IN_FRONT = "write it in front of the text, in the model's own form"
_COMMON = {
    "request_id": Unsupported("send the header `X-Request-Id`"),
    "padding": Unsupported("prompts are never padded", False),
    "instruction": Unsupported(IN_FRONT),
    "task": Unsupported(IN_FRONT),
    "messages": Unsupported("send text: the chat template is for conversations"),
    "mm_processor_kwargs": Unsupported(LATER),
    "use_activation": Unsupported("use `normalize` of /v1/embeddings", True),
    "max_tokens_per_query": Unsupported("use `truncate_prompt_tokens`"),
}
EMBEDDING_UNSUPPORTED: dict[str, Unsupported] = _COMMON | {
    "embed_dtype": Unsupported("vectors are float32", "float32"),
    "endianness": Unsupported("base64 vectors are little-endian", "little", "native"),
    "embed_overrides": Unsupported(LATER),
    "input_type": Unsupported(IN_FRONT),
    "late_chunking": Unsupported("send the chunks as texts of their own", False),
    "truncate": Unsupported("use `truncate_prompt_tokens`"),
}
SCORE_UNSUPPORTED: dict[str, Unsupported] = _COMMON | {
    "max_tokens_per_doc": Unsupported("use `truncate_prompt_tokens`"),
    "dimensions": Unsupported("use /v1/embeddings and compare the vectors yourself"),
}
RERANK_UNSUPPORTED: dict[str, Unsupported] = _COMMON | {
    "rank_fields": Unsupported("send each document as one text"),
    "max_chunks_per_doc": Unsupported("send the chunks as documents of their own"),
    "overlap_tokens": Unsupported("send the chunks as documents of their own"),
    "dimensions": Unsupported("use /v1/embeddings and compare the vectors yourself"),
}
