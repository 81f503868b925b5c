"""What routes answer with, for the OpenAPI document: JSON Schemas, held to the answers by tests.

Objects may have more fields than are named here: those that a request asked for, such as `timings`.
"""

from __future__ import annotations

from server.apis import openapi_adapters
from server.apis.openai import openapi_embeddings, openapi_texts
from server.apis.ops import openapi as served
from server.apis.responses import openapi as responses
from server.batches import openapi as batches
from server.http.openapi_parts import Answers

# Every route that answers with JSON.
ANSWERS: Answers = {
    **openapi_texts.ANSWERS,
    **openapi_embeddings.ANSWERS,
    **responses.ANSWERS,
    **openapi_adapters.ANSWERS,
    **batches.ANSWERS,
    **served.ANSWERS,
}
