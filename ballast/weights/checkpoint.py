"""From a checkpoint's directory to the host tier.

Everything that can be known from headers is checked first; then the files are read, converted to
the dtype in which the model is served, packed and hashed, by several threads. The user's files are
closed before serving begins.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from ballast.core.errors import BrokenPromise, CheckpointError, ConfigError, UnsupportedModel
from ballast.core.model import ModelSpec
from ballast.core.settings import ModelSettings
from ballast.memory.tensor import tensor_at
from ballast.weights import packing
from ballast.weights.adapter import load_adapters
from ballast.weights.architecture import Architecture, learn, packable
from ballast.weights.assemble import READABLE, Recipe, Sources, concatenate, recipes
from ballast.weights.host import HostBytes, HostModel, HostTier
from ballast.weights.origin import origin_of
from ballast.weights.pooling import pools_last_token
from ballast.weights.segment import PackedTensor, Piece, Segment, pack
from ballast.weights.sharding import WHOLE, Shard, absent, divided, narrowed
from ballast.weights.stored import ITEM_BYTES, Stored, find_tensors

THREADS = max(1, min(4, os.cpu_count() or 1))


def load_host_model(
    settings: ModelSettings,
    tier: HostTier | None = None,
    threads: int = THREADS,
    shard: Shard = WHOLE,
) -> HostModel:
    """Read, check, convert and seal the checkpoint at `settings.path`, with so many threads.

    Of a `shard`, only that rank's part is read; its segments are as large on every rank.

    Segments that `tier` has already, of other checkpoints, are shared with them; those that it, or
    another process, has made of the same files are not read at all.

    `dtype: auto` serves what most bytes of the checkpoint are: bfloat16, or float32. A float16
    checkpoint is then served in float32, which holds its numbers exactly; bfloat16 would round
    them, so that has to be asked for.

    Raises CheckpointError (file, tensor, reason), UnsupportedModel, ConfigError for settings that
    do not fit the model, and DeviceError where host memory does not suffice. An adapter with any
    of these faults is left out, and listed in `failed`.
    """
    try:
        return _load(settings, Path(settings.path), tier or HostTier(), threads, shard)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(str(error.filename or settings.path), None, reason) from error


def read_spec(settings: ModelSettings, ranks: int = 1) -> ModelSpec:
    """The spec it would have, of headers alone, on each of so many ranks: no weights are read.

    So segments that are equal to another model's are not known to be, its fingerprint is not that
    of the loaded model, and adapters are not looked at. Raises as `load_host_model`, for what
    headers show.
    """
    directory = Path(settings.path)
    try:
        told = _headers(settings, directory, Shard(0, ranks))
        return _spec(settings, told, directory, b"", ())
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(str(error.filename or settings.path), None, reason) from error


@dataclass(frozen=True, slots=True)
class _Headers:
    """What can be known of a checkpoint before its weights are read."""

    architecture: Architecture
    plan: dict[str, Recipe]
    dtype: str
    segments: tuple[Segment, ...]
    fused: bool
    max_model_len: int
    eos: tuple[int, ...]
    shard: Shard


def _headers(settings: ModelSettings, directory: Path, shard: Shard) -> _Headers:
    config = _read_config(directory)
    stored = find_tensors(directory)
    architecture = learn(config)
    length = _max_model_len(settings, architecture)
    found = recipes(architecture, stored, directory)
    if architecture.tied and _heads_differ(architecture, found):
        architecture = architecture.untied()
    plan = _match(architecture, found, directory)
    dtype = _choose_dtype(settings, plan)
    if shard != WHOLE:
        return _shard(settings, architecture, plan, dtype, length, _eos(directory, config), shard)
    layout = None
    if settings.model_impl != "generic":
        layout = packing.fused(architecture, dtype, packed=settings.linear != "plain")
    if layout is None and settings.model_impl == "fused":
        raise UnsupportedModel(f"{config.model_type}: the fused path does not know its layers")
    fused = layout is not None
    if layout is None:
        linears = packable(architecture) if settings.linear != "plain" else frozenset()
        layout = packing.as_stored(architecture, dtype, linears)
    segments = tuple(pack(*s) for s in layout)
    eos = _eos(directory, config)
    return _Headers(architecture, plan, dtype, segments, fused, length, eos, WHOLE)


def _shard(
    settings: ModelSettings,
    architecture: Architecture,
    plan: Mapping[str, Recipe],
    dtype: str,
    length: int,
    eos: tuple[int, ...],
    shard: Shard,
) -> _Headers:
    """One rank's part. Raises ConfigError for what cannot be divided."""
    packed = settings.linear != "plain"
    if settings.model_impl == "generic" or packing.fused(architecture, dtype) is None:
        allowed = f"{settings.name} is not served by the fused path"
        raise ConfigError("tensor_parallel", shard.ranks, allowed)
    if settings.adapters:
        allowed = f"{settings.name} has adapters, which are not divided so far"
        raise ConfigError("tensor_parallel", shard.ranks, allowed)

    def laid_out(part: Architecture) -> list[Segment]:
        return [pack(*s) for s in packing.fused(part, dtype, packed=packed) or ()]

    part = divided(architecture, settings.name, shard)
    first = divided(architecture, settings.name, Shard(0, shard.ranks))
    sizes = [s.n_bytes for s in laid_out(first)]
    even = tuple(replace(s, n_bytes=n) for s, n in zip(laid_out(part), sizes, strict=True))
    return _Headers(part, narrowed(plan, part, shard), dtype, even, True, length, eos, shard)


def _load(
    settings: ModelSettings, directory: Path, tier: HostTier, threads: int, shard: Shard
) -> HostModel:
    told = _headers(settings, directory, shard)
    plan, dtype = told.plan, told.dtype
    with Sources(plan.values()) as sources:

        def read(name: str) -> Tensor:
            if absent(name, shard):
                return torch.zeros(plan[name].shape, dtype=packing.DTYPES[dtype])
            return sources.read(plan[name], packing.DTYPES[dtype])

        def fill(piece: Piece) -> bytes:
            if not piece.tensor.as_stored:
                return _write(piece, packing.build(piece.tensor, read))
            parts = [plan[name] for name in piece.tensor.sources]
            recipe = concatenate(parts, 0) if len(parts) > 1 else parts[0]
            return _fill(piece, recipe, sources, packing.DTYPES[dtype])

        def origin(segment: Segment) -> str | None:
            return origin_of(segment, plan, sources, lambda name: absent(name, shard))

        memory = HostBytes(settings.name, told.segments, fill, threads, tier, origin)
    host = HostModel(
        _spec(settings, told, directory, memory.digest, memory.digests),
        told.architecture.config,
        directory,
        told.segments,
        memory,
        windows=told.architecture.windows,
        fused=told.fused,
        shard=shard,
    )
    return load_adapters(host, settings.adapters, tier)


def _spec(
    settings: ModelSettings,
    told: _Headers,
    directory: Path,
    content: bytes,
    digests: tuple[str, ...],
) -> ModelSpec:
    """`content`: a digest of all bytes; `digests`: of each segment's."""
    architecture = told.architecture
    return ModelSpec(
        name=settings.name,
        n_layers=architecture.n_layers,
        n_heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        hidden=architecture.hidden,
        intermediate=architecture.intermediate,
        ranks=told.shard.ranks,
        experts_per_token=architecture.experts_per_token,
        expert_intermediate=architecture.expert_intermediate,
        vocab=architecture.vocab,
        dtype=told.dtype,
        max_model_len=told.max_model_len,
        block_tokens=settings.block_tokens,
        segment_bytes=tuple(s.n_bytes for s in told.segments),
        fingerprint=_fingerprint(architecture.config, told.segments, content),
        segment_digests=digests,
        eos_token_ids=told.eos,
        slo=settings.slo,
        priority=settings.priority,
        share=settings.share,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        queue_seconds=settings.queue_seconds,
        embeds=pools_last_token(directory),
        pinned=settings.pinned,
    )


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


def _heads_differ(architecture: Architecture, found: Mapping[str, Recipe]) -> bool:
    """Whether parameters said to be tied are in the files under several names, unlike each other.

    `transformers` does not tie them then, whatever the configuration says.
    """
    for _, wanted in architecture.segments:
        for tensor in wanted:
            stored = [found[n].runs[0].source for n in tensor.names if n in found]
            if any(not _same(stored[0], other) for other in stored[1:]):
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
    architecture: Architecture, found: Mapping[str, Recipe], directory: Path
) -> dict[str, Recipe]:
    """For every tensor that the architecture has, by its first name, how to read it."""
    plan = {}
    for _, wanted in architecture.segments:
        for tensor in wanted:
            recipe = next((found[n] for n in tensor.names if n in found), None)
            if recipe is None:
                raise CheckpointError(str(directory), tensor.names[0], "it is missing")
            if recipe.shape != tensor.shape:
                reason = f"has shape {recipe.shape}, the model needs {tensor.shape}"
                if recipe.plain is not None:
                    raise recipe.plain.error(reason)
                reason = f"put together from {len(recipe.runs)} it {reason}"
                raise CheckpointError(str(directory), tensor.names[0], reason)
            for run in recipe.runs:
                if run.source.dtype not in READABLE:
                    raise run.source.error(
                        f"dtype {run.source.dtype} is not one of {', '.join(READABLE)}"
                    )
            plan[tensor.names[0]] = recipe
    return plan


def _choose_dtype(settings: ModelSettings, plan: Mapping[str, Recipe]) -> str:
    if settings.dtype in packing.DTYPES:
        return settings.dtype
    if settings.dtype != "auto":
        raise ConfigError("dtype", settings.dtype, f"allowed: auto, {', '.join(packing.DTYPES)}")
    n_bytes: Counter[str] = Counter()
    for recipe in plan.values():
        for run in recipe.runs:
            n_bytes[run.source.dtype] += run.n * ITEM_BYTES[run.source.dtype]
    return "bfloat16" if n_bytes.most_common(1)[0][0] == "BF16" else "float32"


def _write(piece: Piece, elements: Tensor) -> bytes:
    """Copy a whole tensor to where it belongs; its SHA-256."""
    if elements.nbytes != piece.n_bytes:
        raise BrokenPromise(f"{piece.tensor.names}: {elements.nbytes} bytes, not {piece.n_bytes}")
    target = tensor_at(piece.address, elements.shape, elements.dtype)
    target.copy_(elements)
    return hashlib.sha256(target.view(torch.uint8).numpy().data).digest()


def _fill(piece: Piece, recipe: Recipe, sources: Sources, dtype: torch.dtype) -> bytes:
    """Read one piece of a tensor, convert it on the way; SHA-256 of the result."""
    target = tensor_at(piece.address, (piece.n_bytes // dtype.itemsize,), dtype)
    sources.fill(recipe, piece.start // dtype.itemsize, target)
    return hashlib.sha256(target.view(torch.uint8).numpy().data).digest()


def _max_model_len(settings: ModelSettings, architecture: Architecture) -> int:
    length = min(settings.max_model_len or architecture.positions, architecture.positions)
    if length > architecture.alike:
        raise UnsupportedModel(
            f"{architecture.config.model_type}: its rotary embeddings (longrope) are others for "
            f"all of a sequence once it exceeds {architecture.alike} tokens, and keys that were "
            "kept would not fit; set max_model_len to at most that"
        )
    return length


def _fingerprint(config: Any, segments: Sequence[Segment], content: bytes) -> str:
    """Hex SHA-256 over the configuration, dtype, names and shapes, and the bytes themselves."""
    told = config.to_dict()
    for incidental in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        told.pop(incidental, None)

    def tensor(t: PackedTensor) -> list[Any]:
        return [t.names, t.shape, t.dtype, t.layout]

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
