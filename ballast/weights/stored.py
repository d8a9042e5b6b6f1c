"""Locate tensors in safetensors and GGUF files by their headers, without reading weights.

A header is checked in full before any data is read, so that an unusable checkpoint is refused with
the file and the tensor at fault, and no job fails later.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ballast.core.errors import CheckpointError
from ballast.fleet.gguf_header import BLOCK_PREFIX
from ballast.fleet.gguf_header import SUFFIX as GGUF_SUFFIX
from ballast.fleet.unfinished_download import is_lfs_pointer, unfinished
from ballast.kernels.panel_forms import BLOCK, FORMS, form_of_name, packed_bytes
from ballast.weights.gguf_tensors import is_gguf_checkpoint, stored_in_gguf
from ballast.weights.quantisation.formats import with_matrices
from ballast.weights.stored_tensor import ITEM_BYTES, StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MOST_HEADER = 100_000_000
"""Most bytes of a header; the format's own limit."""


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Find all tensors of a checkpoint, by name; quantised matrices by those of their weights.

    Reads one file, or the shards of an index. Raises CheckpointError for an inconsistent header, a
    file shorter than its header states, and a missing shard, and UnsupportedModel for an unknown
    quantisation.
    """
    if is_gguf_checkpoint(directory) and not _is_safetensors(directory):
        return stored_in_gguf(directory)
    return with_matrices(_in_safetensors(directory), directory)


def _is_safetensors(directory: Path) -> bool:
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def _in_safetensors(directory: Path) -> dict[str, StoredTensor]:
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    index = directory / INDEX
    if not index.is_file():
        raise CheckpointError(
            str(directory), None, f"has neither {SINGLE} nor {INDEX}; " + _why_none(directory)
        )
    weight_map = _weight_map(index)
    shards = dict.fromkeys(weight_map.values())
    missing = [s for s in shards if Path(s).name != s or not (directory / s).is_file()]
    if missing:
        which = f"{len(missing)} of the {len(shards)} shards that {INDEX} lists"
        first = next(name for name, shard in weight_map.items() if shard == missing[0])
        raise CheckpointError(
            str(directory / missing[0]), first, f"an unfinished download: {which} are missing"
        )
    headers = {shard: read_header(directory / shard) for shard in shards}
    return {
        name: headers[shard][name] for name, shard in weight_map.items() if name in headers[shard]
    }


def quantised_types(stored: Iterable[StoredTensor]) -> frozenset[tuple[str, str]]:
    """Return the types of quantised tensors, each with the form in which it stays packed."""
    found = [t for t in stored if t.is_quantised]
    return frozenset((t.dtype.removeprefix(BLOCK_PREFIX), form_of(t, "float32")) for t in found)


def plain_dtype(stored: StoredTensor) -> str:
    """Return the dtype in which a tensor is served by default beside what stays quantised: what
    does not is dequantised to BF16."""
    return "BF16" if stored.is_quantised else stored.dtype


def _why_none(directory: Path) -> str:
    """Return why a directory may have no weights that can be read."""
    if (left := unfinished(directory)) is not None:
        return f"it is {left}"
    if any(directory.glob("*.safetensors")):
        return "an unfinished download: it has some files of weights, and none that says of what"
    return "other formats need to be converted first"


def served_bytes(directory: Path, dtype: str, *, packed: bool = True) -> int:
    """Estimate the bytes of a checkpoint's weights when served in `dtype` (`auto`: its own).

    `packed`: whether quantised matrices stay so, as on CPUs. Raises CheckpointError, as
    `find_tensors`.
    """
    return sum(served_tensors(directory, dtype, packed=packed).values())


def served_tensors(directory: Path, dtype: str, *, packed: bool = True) -> dict[str, int]:
    """Estimate as `served_bytes`, for each tensor by its name in the checkpoint."""
    tensors = find_tensors(directory)
    if dtype == "auto":
        halves = sum(t.n_bytes for t in tensors.values() if plain_dtype(t) == "BF16")
        whole = sum(t.n_bytes for t in tensors.values())
        dtype = "bfloat16" if 2 * halves > whole else "float32"
    item = 2 if dtype == "bfloat16" else 4

    def n_bytes(t: StoredTensor) -> int:
        form = form_of(t, dtype) if packed else ""
        if not form:
            return item * math.prod(t.shape)
        *outer, n, k = t.shape
        return math.prod(outer) * packed_bytes(form, *((k, n) if t.transposed else (n, k)))

    # Scales and the like are in their matrices' bytes.
    parts = {p.name for t in tensors.values() if t.packing for p in t.files}
    return {name: n_bytes(t) for name, t in tensors.items() if t.packing or name not in parts}


def form_of(stored: StoredTensor, served: str) -> str:
    """Return the form of quantised panels that a matrix keeps where models are served in a dtype by
    our kernels on CPUs; empty: it has none."""
    if stored.packing is not None:
        form = stored.packing.form
        return "" if form_of_name(form).span % BLOCK else form
    if len(stored.shape) != 2:
        return ""
    if stored.path.suffix != GGUF_SUFFIX:
        return ""
    name = stored.dtype.removeprefix(BLOCK_PREFIX)
    if name not in FORMS or (name == "F16" and served != "float32"):
        return ""
    return name if stored.shape[1] % FORMS[name].span == 0 else ""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of one file: its tensors. Raises CheckpointError."""
    size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _truncated(path, None, f"it has {size} bytes, no header")
        if is_lfs_pointer(path):
            why = "it is a pointer of Git LFS, which `git lfs pull` replaces by the file"
            raise CheckpointError(str(path), None, f"an unfinished download: {why}")
        (length,) = struct.unpack("<Q", prefix)
        if length > _MOST_HEADER:
            raise CheckpointError(str(path), None, "corrupt: not a safetensors header")
        if 8 + length > size:
            raise _truncated(path, None, "it ends within its header")
        raw = os.pread(file.fileno(), length, 8)
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), None, f"corrupt header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(str(path), None, "corrupt header: not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    return {name: _entry(path, name, entry, data, size) for name, entry in header.items()}


def _entry(path: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    """Read one header entry; `data`: where the file's tensors begin, `size`: bytes of the file."""
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or not isinstance(dtype, str):
        raise CheckpointError(str(path), name, "corrupt header: its entry makes no sense")
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(
            str(path), name, f"corrupt header: {end - begin} bytes for {dtype} of shape {shape}"
        )
    if data + end > size:
        raise _truncated(path, name, f"it ends at byte {data + end}, the file has {size}")
    return StoredTensor(path, name, dtype, shape, data + begin, end - begin)


def _truncated(path: Path, tensor: str | None, how: str) -> CheckpointError:
    return CheckpointError(str(path), tensor, f"truncated, as an unfinished download is: {how}")


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > _MOST_HEADER:
        raise CheckpointError(str(index), None, f"larger than {_MOST_HEADER} bytes")
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        if all(isinstance(x, str) for pair in weight_map.items() for x in pair):
            return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointError(str(index), None, "corrupt: it has no weight_map of names to files")
