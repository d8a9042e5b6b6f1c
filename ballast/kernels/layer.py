"""Build the operation tables of the CPU kernels in `layer_code.py`, one row per operation.

Used by `models.fused` to compose programs: norms, embedding, rotary position, KV writes.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from ballast.kernels import layer_code as code

Array = np.ndarray[Any, Any]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_compiling = threading.Lock()


def tables(n: int, /, **fields: int | Array) -> Array:
    """int64 (n, N_FIELDS), with the fields named (as in `layer_code`, in lower case) filled in."""
    made = np.zeros((n, code.N_FIELDS), np.int64)
    made[:, code.ITEM_ROWS] = 1
    for name, value in fields.items():
        made[:, getattr(code, name.upper())] = value
    return made


def kernel(name: str, dtype: torch.dtype) -> int:
    """Address of a kernel for weights and KV of `dtype`; compiles if need be.

    `norm`; `embed`, or `embed_scaled`, which multiplies by SCALE; `rotary`, or `rotary_wide` for
    norms with weights in float32 whatever the dtype of the KV; `land`; or `narrow`, `store` or
    `add` for rows of `dtype` that a library takes or gives. There is no `narrow` to float32: raises
    KeyError.
    """
    with _compiling:
        return code.address_of(f"{name}_{_NAMES[dtype]}")


def bits_of(value: float) -> int:
    """A float32 as fields hold it."""
    return int(np.float32(value).view(np.int32))
