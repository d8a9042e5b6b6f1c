"""Let Triton's interpreter add products in the order in which matrix instructions chain them.

Its own dot is NumPy's product, whose order of summation depends on the shapes of its operands: with
it, no kernel could be seen to give the same bits for all shapes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def chained_dots() -> Iterator[None]:
    """Meanwhile a dot adds its products to the accumulator one after the other, in ascending order
    over K. Where the interpreter is off, nothing changes."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    module: Any = interpreter
    builder = module.InterpreterBuilder
    before = builder.create_dot

    def create_dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        sums = total.data.copy()
        for k in range(a.data.shape[1]):
            sums += np.multiply(a.data[:, k, None], b.data[None, k], dtype=sums.dtype)
        return module.TensorHandle(sums, total.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = before
