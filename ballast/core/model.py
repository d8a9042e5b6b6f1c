"""ModelSpec: the sizes of a model that scheduling and memory need; no weights, no framework."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ballast.core.settings import Slo
from ballast.core.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """A LoRA adapter as served on its base: one of the base's segments, one name for clients."""

    name: str
    fingerprint: str
    """Hex digest over its base, its scales and its tensors; keeps cached prefixes apart."""
    rank: int
    """The largest of its matrices."""
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    max_waiting: int = 10_000
    queue_seconds: float | None = None
    """None: the base's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """Memory that jobs of a model need beside weights and KV cache: a bound, measured at load.

    It holds for jobs of up to `step_tokens` tokens and `step_logits` sampled positions.
    """

    step_tokens: int
    step_logits: int
    kept: int
    """Bytes that stay with a lane between jobs: a workspace that models use in turns."""
    freed: int
    """Bytes at the peak of a job that are free again when it ends."""

    @property
    def n_bytes(self) -> int:
        return self.kept + self.freed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and service levels of one model as served (after dtype conversion)."""

    name: str
    n_layers: int
    n_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    dtype: str
    """`float32` or `bfloat16`."""
    max_model_len: int
    block_tokens: int
    segment_bytes: tuple[int, ...]
    """Packed bytes of each segment, in load order: embeddings, layer 0 .. n-1, head (if untied),
    then one for each adapter."""
    fingerprint: str
    """Hex digest over config, dtype and tensors; salts the prefix cache."""
    segment_digests: tuple[str, ...] = ()
    """Hex digest of each segment's layout and bytes: segments with equal ones, of this model or of
    several, share memory. Empty: every segment is unlike all others."""
    eos_token_ids: tuple[int, ...] = ()
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    share: float = 1.0
    max_running: int = 64
    max_waiting: int = 10_000
    queue_seconds: float | None = None
    """A request that waited so long without being admitted fails; None: it waits."""
    embeds: bool = False
    """The checkpoint is of an embedding model: the last token's hidden state stands for a text."""
    pinned: bool = False
    ttl: float | None = None
    """Idle time to live, in seconds; None, 0: idle, it stays until others need its memory."""
    ranks: int = 1
    """Ranks of a tensor-parallel group that share it. Heads, intermediate, segments and what
    follows from them are then one rank's part; `hidden` and `vocab` are whole."""
    experts_per_token: int = 0
    """How many experts a token goes through in a layer; 0: there are none."""
    expert_intermediate: int = 0
    adapters: tuple[AdapterSpec, ...] = ()
    job_memory: JobMemory | None = None
    """None: not measured; `ballast.core.cost.job_memory` estimates it."""
    base: str | None = None
    """Of an adapter in the eyes of a client (`served`): the model it stands on."""

    def slo_of(self, adapter: int | None) -> Slo:
        """Return the service level of its requests; `adapter`: of those for this one of its
        adapters."""
        return self.slo if adapter is None else self.adapters[adapter].slo

    @property
    def served(self) -> tuple[ModelSpec, ...]:
        """This model and each of its adapters, as clients see them: by name, level and limit."""
        adapted = (
            replace(
                self,
                name=a.name,
                fingerprint=a.fingerprint,
                slo=a.slo,
                priority=a.priority,
                max_waiting=a.max_waiting,
                queue_seconds=self.queue_seconds if a.queue_seconds is None else a.queue_seconds,
                adapters=(),
                base=self.name,
            )
            for a in self.adapters
        )
        return (self, *adapted)

    @property
    def dtype_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers for one token."""
        return self.n_layers * 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """One block of `block_tokens` tokens, all layers (block-major layout)."""
        return self.kv_bytes_per_token * self.block_tokens

    @property
    def weight_bytes(self) -> int:
        return weight_bytes([self])

    def weight_pages(self, page_bytes: int) -> int:
        """Pages of its distinct segments, each page aligned."""
        return weight_pages([self], page_bytes)


def weight_bytes(specs: Iterable[ModelSpec]) -> int:
    """Packed bytes of all segments of the models together, equal ones counted once."""
    return sum(_distinct(specs))


def weight_pages(specs: Iterable[ModelSpec], page_bytes: int) -> int:
    """Pages of all segments of the models together, each page aligned, equal ones counted once."""
    return sum(ceil_div(n, page_bytes) for n in _distinct(specs))


def kv_room(pages: int, specs: Iterable[ModelSpec], page_bytes: int, limit: int | None) -> int:
    """Of `pages`, those that weights of the models leave for KV cache, within `limit`; negative
    where weights alone do not fit."""
    room = pages - weight_pages(specs, page_bytes)
    return room if limit is None else min(room, limit)


def _distinct(specs: Iterable[ModelSpec]) -> list[int]:
    alone: list[int] = []
    equal: dict[str, int] = {}
    for spec in specs:
        if spec.segment_digests:
            equal.update(zip(spec.segment_digests, spec.segment_bytes, strict=True))
        else:
            alone += spec.segment_bytes
    return alone + list(equal.values())
