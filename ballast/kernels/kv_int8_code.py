"""Compiled code that rounds keys and values to int8 as they are written into their blocks.

A token's heads lie side by side, then their scales, in a block of KV in int8::

    K of a token    [head 0 | head 1 | ... | scale 0 | scale 1 | ...]
                     int8, head_dim each     float32

An element is int8 times its head's scale, which is the head's largest magnitude / 127: nothing that
is written later changes it, so a token's KV depends on that token alone. Attention multiplies dot
products by the scales of keys, and weights by those of values.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import njit

from ballast.kernels.intrinsics import (
    float32_at,
    float_of,
    int8_at,
    magnitude,
    rounded_int8,
    widen,
)

_MOST = np.float32(127.0)
_NAN = np.float32(np.nan)
_ZERO = np.float32(0.0)
_INFINITY = 0x7F800000
"""Magnitude of infinity."""


@njit(error_model="numpy")
def quantise_heads(source, at, apart, heads, dim, to):
    """Write some heads of a token, `apart` elements from each to the next, at the address `to`.

    A head that is not finite has NaN as its scale, and so do all that attend to it.
    """
    elements, scales = int8_at(to), float32_at(to + heads * dim)
    for h in range(heads):
        first, out = at + h * apart, h * dim
        largest = 0
        for d in range(dim):
            largest = max(largest, magnitude(widen(source[first + d])))
        scale = float_of(largest) / _MOST if largest < _INFINITY else _NAN
        scales[h] = scale
        if scale > _ZERO:
            for d in range(dim):
                elements[out + d] = rounded_int8(widen(source[first + d]) / scale)
        else:
            for d in range(dim):
                elements[out + d] = 0
