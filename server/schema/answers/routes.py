"""What routes answer with, for the OpenAPI document: JSON Schemas, held to the answers by tests.

Objects may have more fields than are named here: those that a request asked for, such as `timings`.
"""

from __future__ import annotations

from server.schema.answers import batches, dialects, responses, served, texts, vectors
from server.schema.answers.parts import Answers

# Every route that answers with JSON.
ANSWERS: Answers = {
    **texts.ANSWERS,
    **vectors.ANSWERS,
    **responses.ANSWERS,
    **dialects.ANSWERS,
    **batches.ANSWERS,
    **served.ANSWERS,
}
