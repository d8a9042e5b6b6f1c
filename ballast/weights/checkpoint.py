"""From a checkpoint's directory to the host tier.

Everything that can be known from headers is checked first; then the files are read, converted to
the dtype in which the model is served, packed and hashed, by several threads. The user's files are
closed before serving begins.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ballast.core.errors import CheckpointError, ConfigError, UnsupportedModel
from ballast.core.model import ModelSpec
from ballast.core.settings import ModelSettings
from ballast.memory.tensor import tensor_at
from ballast.weights.architecture import Architecture, Wanted, learn
from ballast.weights.host import HostBytes, HostModel, PackedTensor, Piece, Segment, pack
from ballast.weights.stored import ITEM_BYTES, Stored, find_tensors

THREADS = max(1, min(4, os.cpu_count() or 1))

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that can be read."""
_SERVED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_host_model(settings: ModelSettings) -> HostModel:
    """Read, check, convert and seal the checkpoint at `settings.path`.

    `dtype: auto` serves what most bytes of the checkpoint are: bfloat16, or float32. A float16
    checkpoint is then served in float32, which holds its numbers exactly; bfloat16 would round
    them, so that has to be asked for.

    Raises CheckpointError (file, tensor, reason), UnsupportedModel, ConfigError for settings that
    do not fit the model, and DeviceError where host memory does not suffice.
    """
    try:
        return _load(settings, Path(settings.path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(str(error.filename or settings.path), None, reason) from error


def _load(settings: ModelSettings, directory: Path) -> HostModel:
    config = _read_config(directory)
    stored = find_tensors(directory)
    architecture = learn(config)
    if architecture.tied and _heads_differ(architecture, stored):
        architecture = architecture.untied()
    length = _max_model_len(settings, architecture)
    sources = _match(architecture, stored, directory)
    dtype = _choose_dtype(settings, sources)
    segments = _pack(architecture, dtype)
    eos = _eos(directory, config)
    by_name = {names[0]: source for names, source in sources.items()}
    with ExitStack() as files:
        paths = {s.path for s in sources.values()}
        handles = {p: files.enter_context(open(p, "rb", buffering=0)).fileno() for p in paths}

        def fill(piece: Piece) -> bytes:
            source = by_name[piece.tensor.names[0]]
            return _fill(piece, source, handles[source.path], _SERVED[dtype])

        memory = HostBytes(settings.name, segments, fill, THREADS)
    spec = ModelSpec(
        name=settings.name,
        n_layers=architecture.n_layers,
        n_heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        hidden=architecture.hidden,
        intermediate=architecture.intermediate,
        vocab=architecture.vocab,
        dtype=dtype,
        max_model_len=length,
        block_tokens=settings.block_tokens,
        segment_bytes=tuple(s.n_bytes for s in segments),
        fingerprint=_fingerprint(architecture.config, segments, memory.digest),
        eos_token_ids=eos,
        slo=settings.slo,
        priority=settings.priority,
        share=settings.share,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        pinned=settings.pinned,
    )
    return HostModel(spec, architecture.config, directory, segments, memory)


def _read_config(directory: Path) -> Any:
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(str(path), None, "there is no such file")
    kind = _read_json(path).get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(str(path), None, "it names no model_type")
    try:
        return AutoConfig.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except ValueError as error:
        raise UnsupportedModel(f"{kind}: {error}") from error
    except Exception as error:
        raise CheckpointError(str(path), None, f"{type(error).__name__}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(str(path), None, f"not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(str(path), None, "not a JSON object")
    return found


def _heads_differ(architecture: Architecture, stored: Mapping[str, Stored]) -> bool:
    """Whether parameters said to be tied are in the files under several names, unlike each other.

    `transformers` does not tie them then, whatever the configuration says.
    """
    for _, wanted in architecture.segments:
        for tensor in wanted:
            found = [stored[n] for n in tensor.names if n in stored]
            if any(not _same(found[0], other) for other in found[1:]):
                return True
    return False


def _same(a: Stored, b: Stored) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = 1 << 24
    with open(a.path, "rb") as left, open(b.path, "rb") as right:
        left.seek(a.start)
        right.seek(b.start)
        return all(
            left.read(n) == right.read(n)
            for n in (min(step, a.n_bytes - at) for at in range(0, a.n_bytes, step))
        )


def _match(
    architecture: Architecture, stored: Mapping[str, Stored], directory: Path
) -> dict[tuple[str, ...], Stored]:
    """For every tensor that the architecture has, by its names, the one in the files."""
    found = {}
    for _, wanted in architecture.segments:
        for tensor in wanted:
            source = next((stored[n] for n in tensor.names if n in stored), None)
            if source is None:
                raise CheckpointError(str(directory), tensor.names[0], "it is missing")
            if source.shape != tensor.shape:
                raise source.error(f"has shape {source.shape}, the model needs {tensor.shape}")
            if source.dtype not in _TORCH:
                raise source.error(f"dtype {source.dtype} is not one of {', '.join(_TORCH)}")
            found[tensor.names] = source
    return found


def _choose_dtype(settings: ModelSettings, sources: Mapping[tuple[str, ...], Stored]) -> str:
    if settings.dtype in _SERVED:
        return settings.dtype
    if settings.dtype != "auto":
        raise ConfigError("dtype", settings.dtype, f"allowed: auto, {', '.join(_SERVED)}")
    n_bytes: Counter[str] = Counter()
    for source in sources.values():
        n_bytes[source.dtype] += source.n_bytes
    return "bfloat16" if n_bytes.most_common(1)[0][0] == "BF16" else "float32"


def _pack(architecture: Architecture, dtype: str) -> tuple[Segment, ...]:
    def sizes(wanted: Wanted) -> tuple[tuple[str, ...], tuple[int, ...], int]:
        return wanted.names, wanted.shape, math.prod(wanted.shape)

    item_bytes = _SERVED[dtype].itemsize
    return tuple(
        pack(name, [sizes(w) for w in wanted], dtype, item_bytes)
        for name, wanted in architecture.segments
    )


def _fill(piece: Piece, source: Stored, fd: int, dtype: torch.dtype) -> bytes:
    """Read one piece of a tensor, convert it on the way; SHA-256 of the result."""
    n = piece.n_bytes // dtype.itemsize
    item_bytes = ITEM_BYTES[source.dtype]
    at = source.start + piece.start // dtype.itemsize * item_bytes
    target = tensor_at(piece.address, (n,), dtype)
    plain: memoryview = target.view(torch.uint8).numpy().data
    if _TORCH[source.dtype] is dtype:
        _read(source, fd, at, plain)
    else:
        buffer = bytearray(n * item_bytes)
        _read(source, fd, at, memoryview(buffer))
        target.copy_(torch.frombuffer(buffer, dtype=_TORCH[source.dtype]))
    return hashlib.sha256(plain).digest()


def _read(source: Stored, fd: int, at: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        try:
            n = os.preadv(fd, [into[done:]], at + done)
        except OSError as error:
            raise source.error(f"cannot be read: {error.strerror}") from error
        if n == 0:
            raise source.error("truncated while it was read")
        done += n


def _max_model_len(settings: ModelSettings, architecture: Architecture) -> int:
    length = min(settings.max_model_len or architecture.positions, architecture.positions)
    if architecture.window is not None and architecture.window < length:
        raise UnsupportedModel(
            f"{architecture.config.model_type}: its attention sees the last {architecture.window} "
            f"tokens only; set max_model_len to at most that"
        )
    return length


def _fingerprint(config: Any, segments: Sequence[Segment], content: bytes) -> str:
    """Hex SHA-256 over the configuration, dtype, names and shapes, and the bytes themselves."""
    told = config.to_dict()
    for incidental in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        told.pop(incidental, None)

    def tensor(t: PackedTensor) -> list[Any]:
        return [t.names, t.shape, t.dtype]

    layout = [[s.name, [tensor(t) for t in s.tensors]] for s in segments]
    text = json.dumps([told, layout], sort_keys=True, default=str)
    return hashlib.sha256(text.encode() + content).hexdigest()


def _eos(directory: Path, config: Any) -> tuple[int, ...]:
    """End-of-sequence tokens: of generation_config.json, or else of config.json."""
    path = directory / "generation_config.json"
    found = _read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
