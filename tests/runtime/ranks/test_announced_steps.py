"""Steps that travel to other ranks as bytes."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.launch import CaptureLaunch, StepLaunch
from runtime.executor.announced import Forward, Sampling
from runtime.messages import PromptImage, SamplingParams
from runtime.ranks.messages import decode, encode
from runtime.scheduler.batch import ImageStages, Masks, NewRow, RowImage, make_batch

PARAMS = SamplingParams(
    max_tokens=3, temperature=0.5, logit_bias={3: -1.0}, banned=((1, 2), (3,)), stop_ids=(4,)
)
BATCH = make_batch(
    slots=[3, 1], starts=[9, 0], q_lens=[1, 4], tokens=[-1, 5, 6, 7, 8], num_new_pages=[0, 1],
    new_pages=[7], sample=[True, False], decode_rows=1, new_rows=[NewRow(1, PARAMS, 2**62, 4, [5])],
    state_slots=[0, 1],
)  # fmt: skip


def plain(value: object) -> object:
    """Without arrays, whose comparison has no one truth value."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    fields = getattr(value, "__struct_fields__", None)
    return value if fields is None else {name: plain(getattr(value, name)) for name in fields}


IMAGE = PromptImage(1, 4, 64, 64, bytes(3 * 64 * 64), b"d" * 32)
ROW_WITH_IMAGE = NewRow(1, PARAMS, 3, 4, [], (RowImage(1, 64, 64, IMAGE.digest),))
ENCODING = replace(
    BATCH,
    new_rows=[ROW_WITH_IMAGE],
    image_stages=(ImageStages(IMAGE.digest, 0, 5, IMAGE), ImageStages(b"e" * 32, 3, 28)),
    images_dropped=(b"f" * 32,),
)


@pytest.mark.parametrize(
    "step",
    [
        Forward(BATCH),
        Forward(ENCODING),
        StepLaunch(BATCH, Bucket(8, 2, False), True, False),
        StepLaunch(BATCH, Bucket(16, 8, False, images=True), True, False),
        CaptureLaunch(Bucket(4, 4, True)),
        Sampling(BATCH.sample, None),
        Sampling(BATCH.sample, Masks([0], b"\x0f\xff")),
    ],
)
def test_a_step_arrives_as_it_was_sent(step: object):
    found = decode(encode(step))
    assert type(found) is type(step)
    assert plain(found) == plain(step)


def test_arrays_of_a_step_that_arrived_can_be_written_to():
    step = decode(encode(Forward(BATCH)))
    assert isinstance(step, Forward)
    step.batch.slots[0] = 5
    assert step.batch.slots.tolist() == [5, 1]
