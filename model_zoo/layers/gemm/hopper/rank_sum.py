"""The sum over ranks in the epilogue of a GEMM of few rows on Hopper (sm_90), in Gluon.

send_tile     writes a tile of y into the memory of all other ranks
receive_tile  adds that tile of all ranks, in their order, as it comes

The protocol is that of model_zoo/layers/all_reduce/sum_of_row.py, and so are the bits: a rank may
add in a GEMM what another one has sent from a norm's kernel.  A program sends its tile before it
waits, and waits for one tile after the other, in the order in which all ranks have them; all
programs have to be resident.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def send_tile(y, at, inside, OUTGOING, WORLD: gl.constexpr):
    """-> y with 0.0 for -0.0, as it is sent; at: elements from the beginning of OUTGOING's rows."""
    y = gl.where(_is_negative_zero(y), 0.0, y).to(y.dtype)
    for i in gl.static_range(WORLD - 1):
        gl.store(OUTGOING[i] + at, y, mask=inside)
    return y


@gluon.jit
def receive_tile(y, at, inside, INCOMING, LIMIT, sender_stride, rank, WORLD: gl.constexpr):
    """y of this rank -> the sum of that of all ranks, in float32.

    INCOMING: the other ranks' rows, `sender_stride` elements from one rank's to the next one's
    """
    total = gl.zeros_like(y.to(gl.float32))
    for sender in range(WORLD):
        if sender == rank:
            total += y.to(gl.float32)
        else:
            index = sender - (sender > rank).to(gl.int32)
            place = INCOMING + index.to(gl.int64) * sender_stride + at
            part = _receive(place, inside, LIMIT)
            total += part.to(gl.float32)
            gl.store(place, _negative_zeros(part), mask=inside)
    return total


@gluon.jit
def _receive(place, inside, LIMIT):
    """What another rank has written, once all of it has come; or what is there, if LIMIT says so.

    LIMIT  [2] int32: polls that a program waits, 0: for ever; and whether one has given up
    """
    x = gl.load(place, mask=inside, other=0.0, volatile=True)
    waits = _any(_is_negative_zero(x))
    polls = 0
    while waits != 0:
        x = gl.load(place, mask=inside, other=0.0, volatile=True)
        waits = _any(_is_negative_zero(x))
        limit = gl.load(LIMIT)
        polls += 1
        if (waits != 0) & (limit > 0):
            over = gl.atomic_max(LIMIT + 1, (polls > limit).to(gl.int32))
            waits = gl.where(over != 0, 0, waits)
    return x


@gluon.jit
def _any(x):
    return gl.max(gl.max(x.to(gl.int32), 1), 0)


@gluon.jit
def _is_negative_zero(x):
    """Of 16 bits."""
    return x.to(gl.int16, bitcast=True) == -32768


@gluon.jit
def _negative_zeros(x):
    """-0.0 in the shape and type of x."""
    return gl.full(x.shape, -32768, gl.int16, x.type.layout).to(x.dtype, bitcast=True)
