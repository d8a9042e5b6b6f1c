"""Fine-tunes of one GGUF model: files of equal shape, each with weights of its own.

A fine-tune of a base model differs from it by a low-rank change of each matrix, as an adapter that
was merged does; here the change is random. What is measured with them depends on shapes and on
distinct bytes alone, not on what they say.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ballast.fleet.gguf_entry import gguf_directory
from ballast.fleet.gguf_header import TYPES, GgufHeader, GgufTensor, read_gguf
from ballast.weights.assemble import Recipe, Sources
from ballast.weights.gguf_blocks import dequantise
from ballast.weights.stored import find_tensors

KINDS = ("BF16", "F16", "Q4_1")
"""Types of the matrices of files that are written."""
RANK = 4
CHANGE = 0.01
"""Standard deviation of the change of a matrix, as a part of that of its elements."""
_NUMBERS = {kind.name: number for number, kind in TYPES.items()}
_START = 24
"""Bytes before a file's first value."""


def write_fine_tune(base: Path, target: Path, kind: str, seed: int | None) -> None:
    """Write `base` anew with matrices of type `kind`, changed by `seed`; None: unchanged.

    Values of the header and vectors are as in `base`.
    """
    header = read_gguf(base)
    tensors = list(header.tensors.values())
    with open(base, "rb") as source, open(target, "wb") as file:
        values = _raw_values(source, header, tensors[0])
        entries, at, alignment = [], 0, int(header.values.get("general.alignment", 32))
        for t in tensors:
            written = TYPES[_NUMBERS[kind]] if len(t.shape) > 1 else t.type
            entries.append(_entry(t, _NUMBERS[written.name], at))
            n_bytes = int(np.prod(t.shape)) // written.elements * written.n_bytes
            at += -(-n_bytes // alignment) * alignment
        head = struct.pack("<4sIQ", b"GGUF", 3, len(tensors)) + values + b"".join(entries)
        file.write(head + bytes(-len(head) % alignment))
        for data in _data(source, tensors, kind, seed):
            file.write(data + bytes(-len(data) % alignment))


def write_checkpoint(file: Path, target: Path) -> None:
    """Write a GGUF file's model as a directory that `transformers` and vLLM read, in bfloat16."""
    made = Path(gguf_directory(file, "path", str(file)))
    target.mkdir(parents=True, exist_ok=True)
    for small in made.iterdir():
        if small.suffix == ".gguf":
            continue
        (target / small.name).write_bytes(small.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    plan = {name: Recipe.of(stored) for name, stored in find_tensors(made).items()}
    with Sources(plan.values()) as sources:
        tensors = {name: sources.read(recipe, torch.bfloat16) for name, recipe in plan.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def kv_bytes_per_token(values: dict[str, object], item_bytes: int = 2) -> int:
    """Bytes of KV of one token, all layers, by a GGUF header's values."""

    def value(key: str) -> int:
        found = values[f"{values['general.architecture']}.{key}"]
        assert isinstance(found, int)
        return found

    heads = value("attention.head_count_kv")
    size = value("embedding_length") // value("attention.head_count")
    return 2 * value("block_count") * heads * size * item_bytes


def _raw_values(source: BinaryIO, header: GgufHeader, first: GgufTensor) -> bytes:
    """The count of values and the values, as they stand in the file: before its first tensor's
    entry."""
    source.seek(0)
    head = source.read(min(t.start for t in header.tensors.values()))
    name = first.name.encode()
    dimensions = struct.pack(f"<I{len(first.shape)}Q", len(first.shape), *first.shape[::-1])
    end = head.rindex(struct.pack("<Q", len(name)) + name + dimensions)
    return head[_START - 8 : end]


def _entry(t: GgufTensor, number: int, offset: int) -> bytes:
    name = t.name.encode()
    shape = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape[::-1])
    return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", number, offset)


def _data(
    source: BinaryIO, tensors: list[GgufTensor], kind: str, seed: int | None
) -> Iterator[bytes]:
    generator = torch.Generator().manual_seed(seed or 0)
    for t in tensors:
        source.seek(t.start)
        raw = source.read(t.n_bytes)
        if len(t.shape) == 1:
            yield raw
            continue
        matrix = _elements(raw, t)
        if seed is not None:
            matrix = _changed(matrix, generator)
        yield encoded(matrix, kind)


def _elements(raw: bytes, t: GgufTensor) -> Tensor:
    """float32."""
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    if t.type.elements > 1:
        return dequantise(data, t.type).view(t.shape)
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[t.type.name]
    return data.view(plain).float().view(t.shape)


def _changed(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """The matrix with a random change of rank `RANK` (rows x columns, float32)."""
    rows, columns = matrix.shape[0], matrix[0].numel()
    left = torch.randn(rows, RANK, generator=generator)
    right = torch.randn(RANK, columns, generator=generator)
    size = CHANGE * float(matrix.std()) / RANK**0.5
    return matrix.add((left @ right).view(matrix.shape), alpha=size)


def encoded(matrix: Tensor, kind: str) -> bytes:
    """Elements as a tensor of type `kind` has them, rounded to nearest."""
    if kind in ("BF16", "F16"):
        dtype = torch.bfloat16 if kind == "BF16" else torch.float16
        return bytes(matrix.to(dtype).contiguous().view(torch.uint8).numpy().tobytes())
    if kind != "Q4_1":
        raise ValueError(f"{kind}: one of {', '.join(KINDS)}")
    blocks = matrix.reshape(-1, 32)
    least = blocks.amin(dim=1, keepdim=True)
    step = (blocks.amax(dim=1, keepdim=True) - least) / 15
    scale = torch.where(step > 0, step, torch.ones_like(step))
    digits = ((blocks - least) / scale).round().clamp(0, 15).to(torch.uint8)
    packed = digits[:, :16] | digits[:, 16:] << 4
    halves = torch.cat([step, least], dim=1).half().view(torch.uint8)
    return bytes(torch.cat([halves, packed], dim=1).numpy().tobytes())
