"""Answers for property tests: texts of what formats are made of, and ways of cutting them."""

from itertools import pairwise

from hypothesis import strategies as st

from server.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.support.parsing.parsing_cases import CASES

FRAGMENTS = (
    *(case.text for case in CASES),
    *(delimiter for format in TOOL_FORMATS.values() for delimiter in format.delimiters()),
    *(delimiter for format in REASONING_FORMATS.values() for delimiter in format.delimiters()),
    *('{"name": "weather", "arguments": ', '{"name": "', '"', "'", "\\", "{", "}", "[", "]", "("),
    *(")", ",", ":", "=", ";", "\n", " ", "weather", "now", "city", "1", "-", "true", "None"),
    *("<", "</", "<think", "functions.", "to=functions.now", "\x00", "\u2028", "é", "😀", "\ufffd"),
)
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)
tool_names = st.sampled_from([None, *TOOL_FORMATS])
reasoning_names = st.sampled_from([None, *REASONING_FORMATS])


def chunks_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]
