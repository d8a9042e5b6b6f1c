"""Locate the tensors of GGUF files, by a file that is made where their headers are parsed.

Only the confined process that makes a checkpoint directory of a GGUF file
(`ballast.weights.gguf_export`) parses its header; others read what that has found. It is checked
like any header, as the process may have been taken over by the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ballast.core.errors import CheckpointError
from ballast.fleet.gguf_header import BLOCK_PREFIX, TYPES, GgufHeader
from ballast.weights.gguf_config import PERMUTED, ROPE_FACTORS, tensor_name
from ballast.weights.stored_tensor import StoredTensor

TENSORS = "gguf_tensors.json"
"""File that says where the tensors are."""
_MOST_BYTES = 1 << 27
_TYPES = {
    (kind.name if kind.elements == 1 else BLOCK_PREFIX + kind.name): kind for kind in TYPES.values()
}


def is_gguf_checkpoint(directory: Path) -> bool:
    """Whether a directory is one that was made of a GGUF file."""
    return (directory / TENSORS).is_file()


def stored_in_gguf(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a directory that was made of a GGUF file, by the names that
    `transformers` has. Raises CheckpointError."""
    path = directory / TENSORS
    if path.stat().st_size > _MOST_BYTES:
        raise CheckpointError(str(path), None, f"larger than {_MOST_BYTES} bytes")
    try:
        found = [_stored(directory, entry) for entry in json.loads(path.read_text("utf-8"))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointError(str(path), None, f"corrupt: {error}") from error
    return {t.name: t for t in found}


def tensor_entry(stored: StoredTensor) -> dict[str, Any]:
    """Return a tensor as it stands in `TENSORS`."""
    return {
        "file": f"{stored.path.stem}.gguf",
        "name": stored.name,
        "dtype": stored.dtype,
        "shape": stored.shape,
        "start": stored.start,
        "heads": stored.heads,
    }


def _stored(directory: Path, entry: dict[str, Any]) -> StoredTensor:
    name, shape = str(entry["name"]), tuple(entry["shape"])
    start, heads, kind = entry["start"], entry["heads"], _TYPES[entry["dtype"]]
    path = directory / Path(entry["file"]).name
    if not all(type(n) is int and n >= 0 for n in (*shape, start, heads)) or not all(shape):
        raise ValueError(f"the entry of {name!r:.100} makes no sense")
    if not shape or shape[-1] % kind.elements or (heads and shape[0] % (2 * heads)):
        raise ValueError(f"{name!r:.100} is {kind.name} of shape {shape}")
    n_bytes = math.prod(shape) // kind.elements * kind.n_bytes
    stored = StoredTensor(path, name, str(entry["dtype"]), shape, start, n_bytes, heads)
    if start + n_bytes > path.stat().st_size:
        raise stored.error("truncated: its file is shorter than it was")
    return stored


def gguf_tensors(headers: Sequence[GgufHeader]) -> dict[str, StoredTensor]:
    """Return the tensors of all parts of a GGUF file, by the names that `transformers` has."""
    values = headers[0].values
    permuted = values.get("general.architecture") in PERMUTED
    heads = values.get("llama.attention.head_count")
    kv_heads = values.get("llama.attention.head_count_kv", heads)
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for t in header.tensors.values():
            if t.name == ROPE_FACTORS:
                continue
            name = tensor_name(t.name)
            dtype = t.type.name if t.type.elements == 1 else BLOCK_PREFIX + t.type.name
            stored = StoredTensor(header.path, name, dtype, t.shape, t.start, t.n_bytes)
            if permuted and ".q_proj." in name:
                stored = _permuted(stored, heads)
            elif permuted and ".k_proj." in name:
                stored = _permuted(stored, kv_heads)
            found[name] = stored
    return found


def _permuted(stored: StoredTensor, heads: object) -> StoredTensor:
    if type(heads) is not int or heads < 1 or stored.shape[0] % (2 * heads):
        raise stored.error(f"its {stored.shape[0]} rows are not those of {heads!r:.40} heads")
    return replace(stored, heads=heads)
