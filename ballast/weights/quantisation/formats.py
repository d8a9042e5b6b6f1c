"""Replace the tensors of quantised matrices by one stored tensor each, in a panel form that holds
their bits: `with_matrices`.

What each tensor means follows from names, dtypes and shapes, and is checked against them; the
configuration says only what these leave open. Imports no PyTorch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ballast.core.errors import CheckpointError
from ballast.core.units import ceil_div
from ballast.kernels.panel_forms import BLOCK, SCALES, form_name
from ballast.weights.quantisation.config import (
    AWQ,
    GPTQ,
    MXFP4,
    NF4,
    PACKED,
    SCALED,
    Quantisation,
    read_quantisation,
)
from ballast.weights.stored_tensor import Packing, StoredTensor

Find = Callable[[str], StoredTensor | None]
"""Finds a tensor of the checkpoint by name."""
_MOST_BYTES = 1 << 20


class Format(NamedTuple):
    """A format of matrices."""

    suffix: str
    """End of the name of the tensor with a matrix's codes."""
    dtypes: tuple[str, ...]
    """Dtypes of that tensor."""
    matrix: Callable[[StoredTensor, Find, Quantisation], StoredTensor | None]
    """Makes the matrix of codes; None: the tensor is none. Raises CheckpointError."""


def _gptq(codes: StoredTensor, find: Find, given: Quantisation) -> StoredTensor:
    """GPTQ: words of codes of consecutive inputs, (k / codes, n)."""
    stem = codes.name.removesuffix("qweight")
    scales, zeros = _part(codes, find, stem + "scales"), _part(codes, find, stem + "qzeros")
    groups, n = _two(scales)
    bits = 32 * _two(zeros)[1] // n
    rows, columns = _two(codes)
    k = rows * 32 // bits if bits in (2, 3, 4, 8) else 0
    if columns != n or _two(zeros) != (groups, n * bits // 32) or k * bits != rows * 32 or not k:
        raise codes.error(f"{codes.shape} words do not fit zeros of {zeros.shape}")
    group = _group(codes, k, groups, given.group)
    index = find(stem + "g_idx")
    order = _order(index, k, group) if index is not None else ""
    parts = [("codes", codes), ("scales", scales), ("zeros", zeros)]
    if index is not None and order:
        parts.append(("index", index))
    kind = "INT4Z" if bits <= 4 else "INT8Z"
    form = form_name(kind, _dtype(scales), _span(k, group, groups), order)
    less = (1.0,) if given.stored_less_one else ()
    packing = Packing(GPTQ, form, tuple(parts), bits, numbers=less)
    return _matrix(codes, f"{stem}weight", f"GPTQ int{bits}", (n, k), packing)


def _awq(codes: StoredTensor, find: Find, given: Quantisation) -> StoredTensor:
    """AWQ: words of codes of eight outputs, (k, n / 8)."""
    stem = codes.name.removesuffix("qweight")
    scales, zeros = _part(codes, find, stem + "scales"), _part(codes, find, stem + "qzeros")
    groups, n = _two(scales)
    k, words = _two(codes)
    if words * 8 != n or _two(zeros) != (groups, words):
        raise codes.error(f"{codes.shape} words do not fit scales of {scales.shape}")
    group = _group(codes, k, groups, given.group)
    form = form_name("INT4Z", _dtype(scales), _span(k, group, groups))
    packing = Packing(AWQ, form, (("codes", codes), ("scales", scales), ("zeros", zeros)), 4)
    return _matrix(codes, f"{stem}weight", "AWQ int4", (n, k), packing)


def _compressed(codes: StoredTensor, find: Find, given: Quantisation) -> StoredTensor:
    """compressed-tensors, packed: words of codes of consecutive inputs, (n, k / codes)."""
    stem = codes.name.removesuffix("_packed")
    scales, shape = _part(codes, find, stem + "_scale"), _part(codes, find, stem + "_shape")
    stated = _numbers(shape)
    n, words = _two(codes)
    bits = {ceil_div(stated[-1], 32 // b): b for b in (2, 8, 4)}.get(words, 0)
    if len(stated) != 2 or stated[0] != n or not bits:
        raise codes.error(f"{codes.shape} words are not those of a matrix of {stated}")
    k = int(stated[1])
    rows, groups = _two(scales)
    if rows != n:
        raise scales.error(f"{scales.shape} scales are not those of {n} rows")
    group = _group(codes, k, groups, given.group)
    parts = [("codes", codes), ("scales", scales)]
    zeros, index = find(stem + "_zero_point"), find(stem + "_g_idx")
    if zeros is not None:
        whole = (n, groups) if zeros.dtype == "I8" else (ceil_div(n, 32 // bits), groups)
        if zeros.dtype not in ("I8", "I32") or zeros.shape != whole:
            raise zeros.error(f"{zeros.dtype} {zeros.shape} are not the zeros of {scales.shape}")
        parts.append(("zeros", zeros))
    order = _order(index, k, group) if index is not None else ""
    if index is not None and order:
        parts.append(("index", index))
    small = "INT4Z" if zeros is not None or bits != 4 else "INT4"
    large = "INT8" if zeros is None else "INT8Z"
    kind = small if bits <= 4 else large
    form = form_name(kind, _dtype(scales), _span(k, group, groups), order)
    packing = Packing(PACKED, form, tuple(parts), bits)
    return _matrix(codes, stem, f"int{bits}", (n, k), packing)


def _scaled(codes: StoredTensor, find: Find, given: Quantisation) -> StoredTensor | None:
    """Bytes, int8 or float8, with scales of rows, blocks, groups, or of all: (n, k)."""
    names = ("_scale", "_scale_inv", "SCB")
    ends = [codes.name.removesuffix("weight") + n if n == "SCB" else codes.name + n for n in names]
    scales = next((found for name in ends if (found := find(name)) is not None), None)
    if scales is None or len(codes.shape) != 2:
        return None  # refused by its dtype
    n, k = codes.shape
    rows, columns = _scale_block(codes, scales, given)
    parts, kind = [("codes", codes), ("scales", scales)], "FP8"
    if codes.dtype == "I8":
        zeros = find(codes.name + "_zero_point")
        kind = "INT8" if zeros is None else "INT8Z"
        if zeros is not None:
            if zeros.dtype != "I8" or zeros.shape != scales.shape:
                raise zeros.error(f"{zeros.dtype} {zeros.shape} are not zeros of {scales.shape}")
            parts.append(("zeros", zeros))
    is_vectorwise = scales.name.endswith("SCB")
    form = form_name(kind, _dtype(scales), _span(k, columns, ceil_div(k, columns)))
    numbers = (1 / 127,) if is_vectorwise else ()
    packing = Packing(SCALED, form, tuple(parts), scale_rows=rows, numbers=numbers)
    name = "bitsandbytes int8" if is_vectorwise else "int8" if codes.dtype == "I8" else "FP8"
    return _matrix(codes, codes.name, name, (n, k), packing)


def _scale_block(codes: StoredTensor, scales: StoredTensor, given: Quantisation) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale."""
    n, k = codes.shape
    shape = scales.shape if len(scales.shape) == 2 else (*scales.shape, 1, 1)[:2]
    if len(scales.shape) <= 2:
        if given.block and shape == (ceil_div(n, given.block[0]), ceil_div(k, given.block[1])):
            return given.block
        rows = {n: 1, 1: n}.get(shape[0], 0)
        if rows and shape[1] == 1:
            return rows, k
        if rows and 1 < shape[1] <= k:
            return rows, _group(codes, k, shape[1], given.group)
    raise scales.error(f"{scales.shape} scales are not those of a matrix of {codes.shape}")


def _four_bits(codes: StoredTensor, find: Find, given: Quantisation) -> StoredTensor | None:
    """bitsandbytes, 4 bits: bytes of two codes, of blocks in row-major order."""
    for kind in ("nf4", "fp4"):
        state = find(f"{codes.name}.quant_state.bitsandbytes__{kind}")
        if state is not None:
            break
    else:
        return None
    try:
        values = json.loads(_bytes(state))
        n, k = (int(size) for size in values["shape"])
        span = int(values["blocksize"])
        offset = float(values.get("nested_offset", 0.0))
        nested = int(values.get("nested_blocksize", 0))
    except (ValueError, KeyError, TypeError) as error:
        raise state.error(f"it is not the state of a matrix: {error}") from error
    scales = _part(codes, find, f"{codes.name}.absmax")
    blocks = n * k // span if span > 0 else 0
    if min(n, k) < 1 or k % span or scales.shape != (blocks,) or 2 * codes.n_bytes != n * k:
        raise codes.error(f"{values['shape']} elements are not in rows of whole blocks of {span}")
    parts = [("codes", codes), ("scales", scales)]
    table = find(f"{codes.name}.quant_map")
    if table is not None:
        parts.append(("values", table))
    if scales.dtype == "U8":
        if nested < 1:
            raise state.error("its scales are quantised, in blocks of no size")
        for role, name in (("nested", "nested_absmax"), ("nested_values", "nested_quant_map")):
            parts.append((role, _part(codes, find, f"{codes.name}.{name}")))
    form = form_name(kind.upper(), "F32", span)
    packing = Packing(NF4, form, tuple(parts), 4, numbers=(offset, float(nested)))
    return _matrix(codes, codes.name, kind.upper(), (n, k), packing)


def _mxfp4(codes: StoredTensor, find: Find, given: Quantisation) -> StoredTensor | None:
    """MXFP4 of GPT-OSS: each expert's matrix (n, k / 32 blocks, 16 bytes); (experts, k, n)."""
    stem = codes.name.removesuffix("_blocks")
    scales = find(f"{stem}_scales")
    if scales is None or len(codes.shape) != 4 or codes.shape[-1] != BLOCK // 2:
        return None
    experts, n, blocks, _ = codes.shape
    if scales.dtype != "U8" or scales.shape != (experts, n, blocks):
        raise scales.error(f"{scales.dtype} {scales.shape} are not scales of {codes.shape}")
    parts = (("codes", codes), ("scales", scales))
    packing = Packing(MXFP4, "MXFP4", parts, 4)
    return replace(
        _matrix(codes, stem, "MXFP4", (experts, blocks * BLOCK, n), packing), transposed=True
    )


FORMATS = {
    GPTQ: Format("qweight", ("I32",), _gptq),
    AWQ: Format("qweight", ("I32",), _awq),
    PACKED: Format("weight_packed", ("I32",), _compressed),
    SCALED: Format("weight", ("I8", "F8_E4M3"), _scaled),
    NF4: Format("weight", ("U8",), _four_bits),
    MXFP4: Format("_blocks", ("U8",), _mxfp4),
}


def with_matrices(stored: Mapping[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors with quantised matrices by the names of their weights.

    Raises UnsupportedModel for a method that is not known, CheckpointError for tensors that do not
    fit together.
    """
    given = read_quantisation(directory)
    if given is None:
        return dict(stored)
    found = matrices_in(stored, given)
    if not any(t.packing for t in found.values()):
        where = directory / "config.json"
        reason = f"its weights should be quantised ({given.method:.80}), and none of them is"
        raise CheckpointError(str(where), None, reason)
    return found


def matrices_in(stored: Mapping[str, StoredTensor], given: Quantisation) -> dict[str, StoredTensor]:
    """Return tensors with those of matrices of the quantisation `given` replaced by one each, if
    there are any; scales and the like stay. Raises CheckpointError as `with_matrices`."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        matrix = _first_match(tensor, stored, given)
        if matrix is None:
            found.setdefault(name, tensor)
        else:
            found[matrix.name] = matrix
    return found


def _first_match(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], given: Quantisation
) -> StoredTensor | None:
    for name in given.formats:
        known = FORMATS[name]
        if tensor.name.endswith(known.suffix) and tensor.dtype in known.dtypes:
            matrix = known.matrix(tensor, stored.get, given)
            if matrix is not None:
                return matrix
    return None


def input_order(
    index: StoredTensor, k: int, group: int
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the inputs of a matrix by their groups, and within these as they are.

    Raises CheckpointError unless all groups are full, except the last.
    """
    groups = _array(index)
    if len(groups) != k or groups.min() < 0 or groups.max() > (k - 1) // group:
        raise index.error(f"it names no groups of {group} of {k} inputs")
    sizes = np.bincount(groups, minlength=ceil_div(k, group))
    if (sizes[:-1] != group).any():
        raise index.error(f"its groups are not of {group} inputs each")
    return np.argsort(groups, kind="stable").astype(np.int32)


def _order(index: StoredTensor, k: int, group: int) -> str:
    """Return a digest of the order of inputs by their groups; empty if it is as they are."""
    order = input_order(index, k, group)
    if (order == np.arange(k)).all():
        return ""
    return hashlib.sha256(order.tobytes()).hexdigest()[:16]


def _matrix(
    codes: StoredTensor, name: str, dtype: str, shape: tuple[int, ...], packing: Packing
) -> StoredTensor:
    return StoredTensor(codes.path, name, dtype, shape, codes.start, codes.n_bytes, packing=packing)


def _part(codes: StoredTensor, find: Find, name: str) -> StoredTensor:
    found = find(name)
    if found is None:
        raise codes.error(f"it is quantised, and its {name} is missing")
    return found


def _two(stored: StoredTensor) -> tuple[int, int]:
    if len(stored.shape) != 2 or not all(stored.shape):
        raise stored.error(f"it has shape {stored.shape}, not two dimensions")
    return stored.shape[0], stored.shape[1]


def _dtype(scales: StoredTensor) -> str:
    if scales.dtype not in SCALES:
        raise scales.error(f"scales in {scales.dtype} are not among {', '.join(SCALES)}")
    return scales.dtype


def _group(codes: StoredTensor, k: int, groups: int, stated: int | None) -> int:
    """Return the inputs of a group."""
    for group in (stated, ceil_div(k, groups)):
        if group and ceil_div(k, group) == groups:
            return group
    raise codes.error(f"{groups} groups are not those of {k} inputs")


def _span(k: int, group: int, groups: int) -> int:
    """Return the span of a form: a whole row's ends with a block."""
    return ceil_div(k, BLOCK) * BLOCK if groups == 1 else group


def _bytes(stored: StoredTensor) -> bytes:
    if stored.n_bytes > _MOST_BYTES:
        raise stored.error(f"it has more than {_MOST_BYTES} bytes")
    with stored.path.open("rb") as file:
        file.seek(stored.start)
        return file.read(stored.n_bytes)


def _array(stored: StoredTensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    kind = {"I32": "<i4", "I64": "<i8"}.get(stored.dtype)
    if kind is None:
        raise stored.error(f"it is in {stored.dtype}, not in integers")
    return np.frombuffer(_bytes(stored), kind).astype(np.int64)


def _numbers(stored: StoredTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in _array(stored))
