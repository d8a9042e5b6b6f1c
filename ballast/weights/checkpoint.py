"""Load a checkpoint's weights into the host tier.

Everything that can be known from configuration and headers is checked first
(`ballast.weights.manifest`); then the files are read, converted to the dtype in which the model is
served, packed, checked for NaN and infinity, and hashed, by several threads. The files are closed
before serving begins. Used by the live device machines and tensor-parallel ranks; never touches
device memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ballast.core.errors import (
    BrokenPromise,
    CheckpointError,
    LimitExceeded,
    NotThere,
    UnsupportedModel,
)
from ballast.core.levels import level_fields
from ballast.core.model import BLOCK_TOKENS, ModelSpec
from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.isolation.calls import Here, Isolation
from ballast.kernels import quantised
from ballast.kernels.quantised import PackedRows
from ballast.memory.tensor import tensor_at
from ballast.weights import packing, packing_experts
from ballast.weights.adapter import adapter_spec, load_adapters, with_adapters
from ballast.weights.assemble import Recipe, Sources, concatenate
from ballast.weights.config import config_of
from ballast.weights.finite import fault_of, is_finite
from ballast.weights.host import HostAdapter, HostBytes, HostModel, HostTier
from ballast.weights.manifest import Manifest, ManifestRequest, read_manifest
from ballast.weights.origin import origin_of
from ballast.weights.sealed_model import SealedAdapter, SealedModel, kind_of
from ballast.weights.segment import Piece, Segment
from ballast.weights.sharding import WHOLE, Shard, absent
from ballast.weights.source_files import identity, listing
from ballast.weights.stored import quantised_types
from ballast.weights.tokenizer_files import digest_of

log = logging.getLogger(__name__)

THREADS = max(1, min(4, os.cpu_count() or 1))


def load_host_model(
    settings: ModelSettings,
    tier: HostTier | None = None,
    threads: int = THREADS,
    shard: Shard = WHOLE,
) -> HostModel:
    """Read, check, convert and seal the checkpoint at `settings.path`, by `threads` threads.

    Of a `shard`, only that rank's part is read; its segments are as large on every rank.

    A model that some worker of this host has loaded before, under this name and with these
    settings, is found again by its sealed segments: its files are not read, and may have changed or
    gone. Else segments that `tier` already has from other checkpoints are shared with them; those
    that it, or another process, has made from the same files are not read at all.

    `dtype: auto` serves the dtype of most bytes of the checkpoint: bfloat16, or float32. A float16
    checkpoint is served in float32, which holds its numbers exactly; bfloat16, which would round
    them, has to be requested. Tensors that `transformers` keeps in float32 stay in that.

    Raises CheckpointError (file, tensor, reason), UnsupportedModel, ConfigError for settings that
    do not fit the model, NotThere for settings with a `fault`, LimitExceeded if reading takes more
    than its limits, and DeviceError if host memory does not suffice. An adapter with any of these
    faults is left out, and listed in `failed`.
    """
    tier = tier or HostTier()
    kind = kind_of(settings, shard)
    record = tier.recall(settings.name, kind)
    again = None if record is None else _again(settings, SealedModel.decode(record), tier)
    if again is not None:
        return again
    try:
        files = identity(settings)
        manifest = _examined(settings, shard, tier.isolation)
        tokenizer = digest_of(Path(settings.path))
        memory = _fill(settings, manifest, tier, threads, shard)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(str(error.filename or settings.path), None, reason) from error
    try:
        host = _host(settings, manifest, memory, shard, tokenizer)
        runs = [run for recipe in manifest.plan.values() for run in recipe.runs]
        if types := quantised_types(run.source for run in runs):
            found = packing.words_on_forms(host.segments, types, host.spec.dtype)
            log.info("%s: quantised: %s", settings.name, found)
        host = load_adapters(host, settings.adapters, manifest.modules, tier)
    except BaseException:
        memory.close()
        raise
    try:
        _keep(settings, kind, files, manifest, host, tier)
    except BaseException:
        host.close()
        raise
    return host


def _host(
    settings: ModelSettings, manifest: Manifest, memory: HostBytes, shard: Shard, tokenizer: str
) -> HostModel:
    """Return the model, without adapters, whose segments are in `memory`."""
    spec = _spec(settings, manifest, shard.ranks)
    digest = hashlib.sha256(spec.fingerprint.encode() + memory.digest).hexdigest()
    return HostModel(
        replace(spec, fingerprint=digest, segment_digests=memory.digests),
        lambda: config_of(json.loads(manifest.config), untied=manifest.untied),
        Path(settings.path),
        manifest.segments,
        memory,
        windows=manifest.windows,
        fused=manifest.fused,
        recipe=manifest.recipe,
        rotary=manifest.rotary,
        norm_epsilon=manifest.norm_epsilon,
        shard=shard,
        tokenizer=tokenizer,
    )


def _keep(
    settings: ModelSettings,
    kind: str,
    files: str,
    manifest: Manifest,
    host: HostModel,
    tier: HostTier,
) -> None:
    """Keep a model that was loaded from `files` for other workers of this host.

    Raises CheckpointError if its files have changed while they were read, or since another worker
    has read them.
    """
    if identity(settings) != files:
        raise CheckpointError(settings.path, None, "its files have changed while they were read")
    sealed = SealedModel(
        digests=host.spec.segment_digests if host.shard == WHOLE else (),
        fingerprint=host.spec.fingerprint,
        files=files,
        listing=listing(settings),
        tokenizer=host.tokenizer,
        manifest=manifest,
        adapters=tuple(
            SealedAdapter(
                *(a.spec.name, a.spec.fingerprint, a.deltas),
                *(a.segment, a.memory.digests[0], a.packed),
            )
            for a in host.adapters
        ),
        failed=dict(host.failed),
    )
    if not tier.keep(settings.name, kind, files, sealed.encode()):
        raise CheckpointError(
            settings.path,
            None,
            f"its files have changed since {settings.name!r} was loaded; what was loaded is still "
            "served elsewhere, or was until a worker died. Remove and add it to serve these",
        )


def _again(settings: ModelSettings, sealed: SealedModel, tier: HostTier) -> HostModel | None:
    """Return a model that was loaded before, from its sealed segments; None if any has gone."""
    n = len(sealed.manifest.segments)
    memory = None
    if sealed.digests:
        memory = HostBytes.again(sealed.manifest.segments, sealed.digests[:n], tier)
    if memory is None:
        return None
    host = _host(settings, sealed.manifest, memory, WHOLE, sealed.tokenizer)
    adapters: list[HostAdapter] = []
    by_name = {one.name: one for one in settings.adapters}
    for one in sealed.adapters:
        held = HostBytes.again([one.segment], [one.digest], tier)
        if held is None:
            with_adapters(host, adapters, {}).close()
            return None
        spec = adapter_spec(by_name[one.name], one.fingerprint, one.deltas, one.packed)
        adapters.append(HostAdapter(spec, one.deltas, one.segment, held, one.packed))
    if host.spec.fingerprint != sealed.fingerprint:
        raise BrokenPromise(f"{settings.name}: other segments than those that were kept")
    sealed.log_changes(settings)
    return with_adapters(host, adapters, sealed.failed)


def read_spec(
    settings: ModelSettings, ranks: int = 1, isolation: Isolation | None = None
) -> ModelSpec:
    """Read a model's spec on each of `ranks` ranks from headers alone, without reading its weights.

    It has no segment digests, its fingerprint is not that of the loaded model, and adapters are
    ignored. Raises as `load_host_model`, for faults that headers show.
    """
    manifest = _examined(settings, Shard(0, ranks), isolation or Here())
    return _spec(settings, manifest, ranks)


def _examined(settings: ModelSettings, shard: Shard, isolation: Isolation) -> Manifest:
    if settings.fault:
        raise NotThere(settings.fault)
    # Only what a manifest depends on: devices, service levels and others change without another
    # examination.
    reading = ModelSettings(
        name=settings.name,
        path=settings.path,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        model_impl=settings.model_impl,
        linear=settings.linear,
        adapters=tuple(AdapterSettings(name=a.name, path=a.path) for a in settings.adapters),
    )
    try:
        return isolation.call(read_manifest, ManifestRequest(reading, shard), Manifest)
    except LimitExceeded as error:
        what = f"{settings.path}: trying its configuration"
        raise LimitExceeded(f"{what}, {error}") from error


def _fill(
    settings: ModelSettings, manifest: Manifest, tier: HostTier, threads: int, shard: Shard
) -> HostBytes:
    """Read the weights into segments of the host tier."""
    plan, served = manifest.plan, packing.DTYPES[manifest.dtype]
    with Sources(plan.values()) as sources:

        def read(name: str, dtype: torch.dtype) -> Tensor:
            if absent(name, shard):
                return torch.zeros(plan[name].shape, dtype=dtype)
            return sources.read(plan[name], dtype)

        def read_part(name: str, start: int, target: Tensor) -> None:
            sources.fill(plan[name], start, target)

        def write(piece: Piece) -> Tensor:
            tensor = piece.tensor
            if tensor.layout in packing_experts.LAYOUTS:
                expert = piece.start // tensor.piece_bytes
                if tensor.form:
                    return _write_expert(piece, expert, plan[tensor.sources[0]], sources)
                return _write(piece, packing_experts.build(tensor, expert, read_part))
            if tensor.form:
                return _write_quantised(piece, [plan[name] for name in tensor.sources], sources)
            if not tensor.as_stored:
                return _write(piece, packing.build(tensor, read, served))
            parts = [plan[name] for name in tensor.sources]
            recipe = concatenate(parts, 0) if len(parts) > 1 else parts[0]
            return _copy(piece, recipe, sources, packing.DTYPES[tensor.dtype])

        def fill(piece: Piece) -> bytes:
            target = write(piece)
            if not piece.tensor.form and not is_finite(target):
                read_from = [plan[n] for n in piece.tensor.sources if not absent(n, shard)]
                raise fault_of(read_from, sources, packing.read_dtype(piece.tensor, served))
            return hashlib.sha256(target.view(torch.uint8).numpy().data).digest()

        def origin(segment: Segment) -> str | None:
            return origin_of(segment, plan, sources, lambda name: absent(name, shard))

        return HostBytes(settings.name, manifest.segments, fill, threads, tier, origin)


def clipped_context(settings: ModelSettings, spec: ModelSpec) -> str | None:
    """Return a warning about a `limits.context` beyond the model's own; None: it is within."""
    if settings.max_model_len is None or settings.max_model_len <= spec.max_model_len:
        return None
    return (
        f"limits.context of {settings.max_model_len} is beyond the model's own context; "
        f"{spec.max_model_len} tokens are served"
    )


def _spec(settings: ModelSettings, manifest: Manifest, ranks: int) -> ModelSpec:
    """Return the spec without the segments' digests, which only their bytes show."""
    _check_kv_dtype(settings, manifest, ranks)
    # KV of different dtypes never meets: names of blocks begin with the fingerprint.
    kept = "" if settings.kv_dtype == "auto" else f"-{settings.kv_dtype}"
    return ModelSpec(
        name=settings.name,
        n_layers=manifest.n_layers,
        n_heads=manifest.heads,
        kv_heads=manifest.kv_heads,
        head_dim=manifest.head_dim,
        hidden=manifest.hidden,
        intermediate=manifest.intermediate,
        ranks=ranks,
        experts_per_token=manifest.experts_per_token,
        expert_intermediate=manifest.expert_intermediate,
        vocab=manifest.vocab,
        attention_layers=manifest.attention_layers,
        layer_kv=manifest.layer_kv if ranks == 1 else (),
        kv_windows=manifest.kv_windows if ranks == 1 else (),
        states=manifest.states,
        dtype=manifest.dtype,
        kv_dtype=settings.kv_dtype,
        max_model_len=manifest.max_model_len,
        block_tokens=settings.block_tokens or BLOCK_TOKENS,
        segment_bytes=tuple(s.n_bytes for s in manifest.segments),
        parameters=sum(manifest.stored.values()),
        stored_in=max(manifest.stored, key=manifest.stored.__getitem__, default=""),
        fingerprint=manifest.fingerprint + kept,
        segment_digests=(),
        eos_token_ids=manifest.eos,
        sampling=settings.sampling.over(manifest.sampling),
        generates=manifest.generates,
        expected_tokens=settings.expected_tokens,
        expected_longest=settings.expected_longest,
        max_answer=settings.max_answer,
        embeds=manifest.embeds,
        pooling=manifest.pooling,
        **level_fields(settings),
    )


def _check_kv_dtype(settings: ModelSettings, manifest: Manifest, ranks: int) -> None:
    """Raise UnsupportedModel if the model keeps nothing that `kv_dtype` could be of."""
    if settings.kv_dtype == "auto":
        return
    why = "an encoder keeps no KV" if manifest.pooling else ""
    if ranks == 1 and any(kv.latent for kv in manifest.layer_kv):
        why = "its attention keeps latents, which are not rounded to 8 bits"
    if manifest.alibi:
        why = "its keys hold positions (ALiBi), which are not rounded to 8 bits"
    if why:
        raise UnsupportedModel(
            f"{settings.name}: kv_dtype {settings.kv_dtype}: {why}; leave it out"
        )


def _write(piece: Piece, elements: Tensor) -> Tensor:
    """Copy a whole tensor to its place in the segment; returns it there."""
    if elements.nbytes != piece.n_bytes:
        raise BrokenPromise(f"{piece.tensor.names}: {elements.nbytes} bytes, not {piece.n_bytes}")
    target = tensor_at(piece.address, elements.shape, elements.dtype)
    return target.copy_(elements)


def _write_quantised(piece: Piece, plan: Sequence[Recipe], sources: Sources) -> Tensor:
    """Pack a matrix that stays quantised in its place in the segment; returns it there."""
    rows = _finite_rows(piece.tensor.form, plan, sources)
    return _write(piece, packing.build_quantised(piece.tensor, rows))


def _write_expert(piece: Piece, expert: int, recipe: Recipe, sources: Sources) -> Tensor:
    """Pack the quantised matrix of one of the experts of `recipe`; returns it in its place."""
    _, n, k = piece.tensor.shape
    parts = [Recipe.of(run.source) for run in recipe.cut(expert * n * k, n * k)]
    rows = _finite_rows(piece.tensor.form, parts, sources)
    return _write(piece, packing_experts.build_quantised(piece.tensor, rows))


def _finite_rows(form: str, plan: Sequence[Recipe], sources: Sources) -> list[PackedRows]:
    """Read the rows of matrices in a form. Raises CheckpointError for weights that are not
    finite."""
    rows = [sources.read_rows(recipe, form) for recipe in plan]
    if not all(quantised.is_finite(part, form) for part in rows):
        raise fault_of(plan, sources, torch.float32)
    return rows


def _copy(piece: Piece, recipe: Recipe, sources: Sources, dtype: torch.dtype) -> Tensor:
    """Read one piece of a tensor and convert it on the way; returns the result, in its place."""
    target = tensor_at(piece.address, (piece.n_bytes // dtype.itemsize,), dtype)
    sources.fill(recipe, piece.start // dtype.itemsize, target)
    return target
