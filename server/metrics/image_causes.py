"""ImageCause: why images of requests are refused.

A file of its own, since servers of text load nothing of server/images/.
"""

from __future__ import annotations

from typing import Literal

ImageCause = Literal[
    "model",  # it reads no images
    "count",  # there are more than a request may have
    "source",  # what should say or name its bytes does not: a data URL, a URL, a file
    "not_allowed",  # a URL that the server does not fetch
    "fetch",  # a URL that the server could not fetch
    "format",  # bytes that are of no format which is read, or not of the one declared
    "damaged",
    "size",  # bytes, pixels, proportions, or memory or time to decode them
]
