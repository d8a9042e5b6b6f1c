"""Define `ModelSpec`: the sizes of a model that scheduling and memory management need.

Built when a checkpoint is loaded (or by the simulator) and read everywhere. No weights, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ballast.core.levels import Levels, ModelLevels, Slo, level_fields
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.core.units import ceil_div

BLOCK_TOKENS = 16
"""Tokens of a block of KV, about, of models whose settings name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec(Levels):
    """A LoRA adapter as served on its base: one of the base's segments, one name for clients."""

    name: str
    fingerprint: str
    """Hex digest over its base, its scales and its tensors; salts its cached prefixes."""
    rank: int
    """Largest rank of its matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """Memory that jobs of a model need beside weights and KV cache: a bound, measured at load.

    It holds for jobs of up to `step_tokens` tokens and `step_logits` sampled positions.
    """

    step_tokens: int
    step_logits: int
    kept: int
    """Bytes that a lane keeps between jobs: a workspace that models use in turns."""
    freed: int
    """Further bytes at the peak of a job, freed when it ends."""

    @property
    def n_bytes(self) -> int:
        return self.kept + self.freed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ModelLevels):
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
    """Hex digest of each segment's layout and bytes: segments with equal digests, in one model or
    in several, share memory. Empty: no segment is shared."""
    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Values for what requests leave open, of the fleet file and else of the checkpoint."""
    generates: bool = True
    """Whether it has a head to generate with: some embedding models come without one."""
    expected_tokens: float = 0.0
    """Tokens per second, of prompts and outputs, that clients are expected to ask for; 0:
    unknown."""
    expected_longest: int = 0
    """Tokens of the longest request to expect, prompt and output together; 0: the context."""
    max_answer: int | None = None
    """Bound of the values of one answer: tokens, and alternatives of log-probabilities; None: the
    server's."""
    embeds: bool = False
    """Whether it is an embedding model: the last token's hidden state is a text's embedding."""
    ranks: int = 1
    """Ranks of a tensor-parallel group that share it. Heads, intermediate and segments, and sizes
    derived from them, are then one rank's part; `hidden` and `vocab` are whole."""
    experts_per_token: int = 0
    """Experts that a token goes through in a layer; 0: the model has no experts."""
    expert_intermediate: int = 0
    adapters: tuple[AdapterSpec, ...] = ()
    job_memory: JobMemory | None = None
    """Memory of its jobs; None: not measured, `ballast.core.cost.job_memory` estimates it."""
    base: str | None = None
    """Name of the base model, in the spec of an adapter as a client sees it (`served`)."""

    def slo_of(self, adapter: int | None) -> Slo:
        """Return the service level of requests for the model, or for its adapter of that index."""
        return self.slo if adapter is None else self.adapters[adapter].slo

    @property
    def served(self) -> tuple[ModelSpec, ...]:
        """This model and each of its adapters as models of their own, as clients see them."""
        own = {"queue_seconds": self.queue_seconds}
        adapted = (
            replace(
                self,
                name=a.name,
                fingerprint=a.fingerprint,
                **{**level_fields(a), **({} if a.queue_seconds is not None else own)},
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
        """Bytes of K and V of all layers for one token."""
        return self.n_layers * 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of `block_tokens` tokens, all layers (block-major layout)."""
        return self.kv_bytes_per_token * self.block_tokens

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request to expect."""
        return min(self.expected_longest or self.max_model_len, self.max_model_len)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes([self])

    def weight_pages(self, page_bytes: int) -> int:
        """Return the pages of its distinct segments, each aligned to a page."""
        return weight_pages([self], page_bytes)


def weight_bytes(specs: Iterable[ModelSpec]) -> int:
    """Return the packed bytes of all segments of the models, equal segments counted once."""
    return sum(_distinct(specs))


def weight_pages(specs: Iterable[ModelSpec], page_bytes: int) -> int:
    """Return the pages of all segments of the models, each aligned to a page, equal ones once."""
    return sum(ceil_div(n, page_bytes) for n in _distinct(specs))


def kv_room(pages: int, specs: Iterable[ModelSpec], page_bytes: int, limit: int | None) -> int:
    """Return the pages, of `pages`, that the models' weights leave for KV cache, up to `limit`;
    negative if the weights alone do not fit."""
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
