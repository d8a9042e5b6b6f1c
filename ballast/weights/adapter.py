"""Load LoRA adapters in PEFT's format: check them against their base model, pack them beside it.

An adapter adds `scale * (x A^T) B^T` to the output of some of its base's linear modules. Its
matrices become one more segment of the base in the host tier, in the base's dtype: they are on the
device whenever the base is. B is kept transposed, as the kernels read it: (rank, outputs). One that
`ballast fleet delta` made may have whole matrices in few bits, too (`packed_delta`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ballast.core.errors import (
    BallastError,
    CheckpointError,
    LimitExceeded,
    NotThere,
    UnsupportedModel,
    brief,
)
from ballast.core.levels import level_fields
from ballast.core.model import AdapterSpec, ModelSpec
from ballast.core.settings import AdapterSettings
from ballast.fleet.unfinished_download import unfinished
from ballast.memory.tensor import tensor_at
from ballast.weights import packed_delta
from ballast.weights.assemble import READABLE, Recipe, Sources
from ballast.weights.config import read_json
from ballast.weights.finite import fault_of, is_finite
from ballast.weights.host import (
    HostAdapter,
    HostBytes,
    HostModel,
    HostTier,
    LoraDelta,
    PackedDelta,
)
from ballast.weights.module_pattern import ModulePattern
from ballast.weights.packing import DTYPES
from ballast.weights.segment import PLAIN, PackedTensor, Piece, pack
from ballast.weights.source_files import ADAPTER_CONFIG, ADAPTER_TENSORS
from ballast.weights.stored import read_header
from ballast.weights.stored_tensor import StoredTensor

MAX_RANK = 512

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of its own matrices",
    "modules_to_save": "whole modules of its own",
    "layer_replication": "replicated layers",
    "target_parameters": "parameters outside of linear modules",
    "trainable_token_indices": "token embeddings of its own",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal matrices",
    "alora_invocation_tokens": "activation by a token",
    "arrow_config": "routing between adapters",
}
_LARGEST_SCALE = torch.finfo(torch.float32).max
_PLAIN_STARTS = ("gaussian", "orthogonal", "eva")
"""Initialisations that leave the base's weights as they are."""


def load_adapters(
    host: HostModel,
    settings: Sequence[AdapterSettings],
    modules: Mapping[str, tuple[int, int]],
    tier: HostTier,
) -> HostModel:
    """Return `host` with the adapters that can be served, and in `failed` the reasons of the
    others.

    `modules`: (inputs, outputs) of the base's modules that can be adapted, by path. Takes over
    `host`: close the result in its place.
    """
    if not settings:
        return host
    adapters: list[HostAdapter] = []
    failed: dict[str, str] = {}
    for one in settings:
        try:
            adapters.append(load_adapter(one, host.spec, modules, tier))
        except BallastError as error:
            failed[one.name] = str(error)
    return with_adapters(host, adapters, failed)


def with_adapters(
    host: HostModel, adapters: Sequence[HostAdapter], failed: Mapping[str, str]
) -> HostModel:
    """Return `host` with adapters, which it takes over; `failed`: reasons of those left out."""
    spec = replace(
        host.spec,
        segment_bytes=(*host.spec.segment_bytes, *(a.segment.n_bytes for a in adapters)),
        segment_digests=(
            *host.spec.segment_digests,
            *(digest for a in adapters for digest in a.memory.digests),
        ),
        adapters=tuple(a.spec for a in adapters),
    )
    return replace(host, spec=spec, adapters=tuple(adapters), failed=dict(failed))


def load_adapter(
    settings: AdapterSettings,
    base: ModelSpec,
    modules: Mapping[str, tuple[int, int]],
    tier: HostTier,
) -> HostAdapter:
    """Read, check, convert and seal the adapter at `settings.path`.

    `modules`: as for `load_adapters`. Raises CheckpointError (file, tensor, reason),
    UnsupportedModel, NotThere for settings with a `fault`, LimitExceeded if reading takes more than
    its limits, and DeviceError if host memory does not suffice.
    """
    if settings.fault:
        raise NotThere(settings.fault)
    wanted = AdapterSource(Path(settings.path), dict(modules))
    try:
        parts = tier.isolation.call(read_parts, wanted, AdapterParts)
    except LimitExceeded as error:
        raise LimitExceeded(f"{settings.path}: matching it with its base, {error}") from error
    try:
        return _load(settings, parts, base, modules, tier)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(str(error.filename or settings.path), None, reason) from error


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter's directory, and the modules of its base that it may change."""

    directory: Path
    modules: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Pair:
    """The stored matrices A and B of one module."""

    module: str
    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """What an adapter has for the modules that it changes, each in the base's order."""

    pairs: tuple[Pair, ...]
    packed: tuple[packed_delta.StoredDelta, ...] = ()


def read_parts(wanted: AdapterSource) -> AdapterParts:
    """Read an adapter's configuration and header, and check them against its base. Raises
    CheckpointError and UnsupportedModel."""
    path = wanted.directory / ADAPTER_TENSORS
    try:
        config = _Config.read(wanted.directory / ADAPTER_CONFIG)
        if not path.is_file():
            left = unfinished(wanted.directory) or "only safetensors are read"
            raise CheckpointError(str(path), None, f"there is no such file; {left}")
        tensors = read_header(path)
        packed: tuple[packed_delta.StoredDelta, ...] = ()
        if config.kind == packed_delta.KIND:
            tensors, packed = packed_delta.split(tensors, wanted.modules)
        if not (tensors or packed):
            raise CheckpointError(str(path), None, "it holds no tensors")
        return AdapterParts(_pairs(path, tensors, config, wanted.modules), packed)
    except BallastError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(str(error.filename or path), None, reason) from error
    except Exception as error:  # unforeseen contents of the files
        raise CheckpointError(str(wanted.directory), None, brief(error)) from error


def _load(
    settings: AdapterSettings,
    parts: AdapterParts,
    base: ModelSpec,
    modules: Mapping[str, tuple[int, int]],
    tier: HostTier,
) -> HostAdapter:
    pairs = parts.pairs
    tensors = _read(pairs, DTYPES[base.dtype])
    placed = [
        PackedTensor((name,), tuple(t.shape), base.dtype, 0, t.nbytes, PLAIN, (name,))
        for name, t in tensors.items()
    ]
    placed += [packed_delta.tensor(d) for d in parts.packed]
    segment = pack(f"adapter {settings.name}", placed)
    n = 2 * len(pairs)
    with packed_delta.reading(parts.packed) as packed_by_name:

        def fill(piece: Piece) -> bytes:
            # Differences in few bits are as large as a quantised model: one at a time is read.
            name = piece.tensor.names[0]
            made = packed_by_name[name]() if name in packed_by_name else tensors[name]
            part = made.view(-1).view(torch.uint8)[piece.start : piece.start + piece.n_bytes]
            tensor_at(piece.address, part.shape, part.dtype).copy_(part)
            return hashlib.sha256(part.numpy().data).digest()

        memory = HostBytes(settings.name, [segment], fill, 1, tier)
    deltas = tuple(
        LoraDelta(pair.module, *modules[pair.module], pair.rank, pair.scale, a, b)
        for pair, a, b in zip(pairs, segment.tensors[:n:2], segment.tensors[1:n:2], strict=True)
    )
    packed = tuple(
        PackedDelta(d.module, t) for d, t in zip(parts.packed, segment.tensors[n:], strict=True)
    )
    of = [[d.module, d.rank, d.scale] for d in deltas] + [[p.module, p.weight.form] for p in packed]
    identity = json.dumps([base.fingerprint, of])
    fingerprint = hashlib.sha256(identity.encode() + memory.digest).hexdigest()
    spec = adapter_spec(settings, fingerprint, deltas, packed)
    return HostAdapter(spec, deltas, segment, memory, packed)


def adapter_spec(
    settings: AdapterSettings,
    fingerprint: str,
    deltas: Sequence[LoraDelta],
    packed: Sequence[PackedDelta],
) -> AdapterSpec:
    """Return the spec of a loaded adapter."""
    return AdapterSpec(
        name=settings.name,
        fingerprint=fingerprint,
        rank=max((d.rank for d in deltas), default=0),
        in_few_bits=bool(packed),
        **level_fields(settings),
    )


@dataclass(frozen=True, slots=True)
class _Config:
    """Ranks and scales from adapter_config.json."""

    path: Path
    kind: str
    rank: int
    alpha: float
    rank_patterns: Sequence[tuple[ModulePattern, int]]
    alpha_patterns: Sequence[tuple[ModulePattern, float]]
    rs: bool
    """Rank-stabilised: the scale is alpha / sqrt(rank) instead of alpha / rank."""

    @classmethod
    def read(cls, path: Path) -> _Config:
        """Raises CheckpointError, and UnsupportedModel for features that the kernels lack."""
        if not path.is_file():
            raise CheckpointError(str(path), None, "there is no such file")
        config = read_json(path)
        _refuse(path, config)
        patterns = [config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")]
        numbers: list[Any] = [config.get("r"), config.get("lora_alpha")]
        for pattern in patterns:
            if not isinstance(pattern, dict):
                raise CheckpointError(str(path), None, "its patterns are not JSON objects")
            numbers += pattern.values()
        if not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise CheckpointError(
                str(path), None, "r, lora_alpha and the values of its patterns must be numbers"
            )
        rs = bool(config.get("use_rslora"))
        ranks, alphas = ([(_pattern(path, k), v) for k, v in p.items()] for p in patterns)
        kind = str(config["peft_type"])
        return cls(path, kind, config["r"], config["lora_alpha"], ranks, alphas, rs)

    def of(self, module: str) -> tuple[int, float]:
        """Return (rank, scale) of one module."""
        rank = _by_pattern(self.rank_patterns, module, self.rank)
        alpha = _by_pattern(self.alpha_patterns, module, self.alpha)
        return int(rank), alpha / (math.sqrt(rank) if self.rs else rank) if rank > 0 else 0.0


def _pattern(path: Path, text: str) -> ModulePattern:
    try:
        return ModulePattern(text)
    except ValueError as error:
        raise CheckpointError(str(path), None, f"pattern {text!r:.200}: {error}") from error


def _by_pattern(
    patterns: Sequence[tuple[ModulePattern, float]], module: str, default: float
) -> float:
    """Return the value of the first pattern that the module's path matches, as in PEFT."""
    return next((value for pattern, value in patterns if pattern.matches(module)), default)


def _refuse(path: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for an adapter that is more than low-rank products."""
    kind = config.get("peft_type")
    if kind not in ("LORA", packed_delta.KIND):
        raise UnsupportedModel(f"{path}: an adapter of type {kind!r}; only LORA is supported")
    unsupported = [what for key, what in _REFUSED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        unsupported.append("biases of the base")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start not in _PLAIN_STARTS:
        unsupported.append(f"a base changed by its initialisation ({start})")
    if unsupported:
        raise UnsupportedModel(f"{path}: the adapter needs {', '.join(unsupported)}; not supported")


def _pairs(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    config: _Config,
    modules: Mapping[str, tuple[int, int]],
) -> tuple[Pair, ...]:
    """Return A and B of each module that the file adapts, checked, in the model's order."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise stored.error("not a LoRA matrix of a linear module; nothing else is supported")
        if match[1] not in modules:
            raise stored.error(f"the base has no linear module {match[1]!r}")
        halves.setdefault(match[1], {})[match[2]] = stored
    pairs = []
    for module, (inputs, outputs) in modules.items():
        if module not in halves:
            continue
        rank, scale = config.of(module)
        if abs(scale) > _LARGEST_SCALE:
            raise CheckpointError(str(config.path), None, f"a scale of {scale:g}, beyond float32")
        if not 1 <= rank <= MAX_RANK:
            raise UnsupportedModel(
                f"{config.path}: rank {rank} of {module!r}; 1 to {MAX_RANK} are supported"
            )
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            if half not in halves[module]:
                name = f"base_model.model.{module}.lora_{half}.weight"
                raise CheckpointError(str(path), name, "it is missing")
            stored = halves[module][half]
            if stored.shape != shape:
                raise stored.error(f"has shape {stored.shape}, rank and base need {shape}")
            if stored.dtype not in READABLE:
                raise stored.error(f"dtype {stored.dtype} is not one of {', '.join(READABLE)}")
        pairs.append(Pair(module, halves[module]["A"], halves[module]["B"], scale))
    return tuple(pairs)


def _read(pairs: Sequence[Pair], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read A, and B transposed, of each module in turn; returns them by name."""
    found: dict[str, Tensor] = {}
    with Sources([Recipe.of(half) for pair in pairs for half in (pair.a, pair.b)]) as sources:
        for pair in pairs:
            a, b = (_finite(Recipe.of(half), sources, dtype) for half in (pair.a, pair.b))
            found[f"{pair.module}.lora_A"] = a
            found[f"{pair.module}.lora_B"] = b.t().contiguous()
    return found


def _finite(half: Recipe, sources: Sources, dtype: torch.dtype) -> Tensor:
    """Read one matrix. Raises CheckpointError if it is not finite."""
    matrix = sources.read(half, dtype)
    if not is_finite(matrix):
        raise fault_of([half], sources, dtype)
    return matrix
