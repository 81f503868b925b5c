"""Announced steps as bytes: every field of them, arrays as their dtype and their bytes."""

from __future__ import annotations

from typing import Any, get_origin

import msgspec
import numpy as np

from runtime.cuda_graph.launch import CaptureLaunch, StepLaunch
from runtime.executor.announced import Forward, Sampling

Announced = Forward | Sampling | StepLaunch | CaptureLaunch


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    raise TypeError(f"a step has a {type(value).__name__}, which ranks cannot be sent")


def _decode(kind: Any, stored: Any) -> Any:
    if kind is np.ndarray or get_origin(kind) is np.ndarray:
        dtype, values = stored
        return np.frombuffer(values, dtype=dtype).copy()  # one that can be written to
    raise TypeError(f"a step has a {kind}, which ranks cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_decoder: msgspec.msgpack.Decoder[Announced] = msgspec.msgpack.Decoder(Announced, dec_hook=_decode)


def encode(message: object) -> bytes:
    return _encoder.encode(message)


def decode(message: bytes) -> Announced:
    return _decoder.decode(message)
