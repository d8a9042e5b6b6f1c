"""Define `ModelSpec`: the sizes of a model that scheduling and memory management need.

Built when a checkpoint is loaded (or by the simulator) and read everywhere. No weights, no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ballast.core.levels import Levels, ModelLevels, Slo, level_fields
from ballast.core.sampling_defaults import SamplingDefaults
from ballast.core.units import ceil_div

BLOCK_TOKENS = 16
"""Tokens of a block of KV, about, of models whose settings name none."""
INT8 = "int8"
"""`ModelSpec.kv_dtype` of KV in 8 bits with scales."""
KV_SCALE_BYTES = 4
"""Bytes of the scale, float32, of a head's key or value in 8 bits."""
STATE_LINE = 64
"""Bytes of a state's header, its position; each of its tensors begins at a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec(Levels):
    """A LoRA adapter as served on its base: one of the base's segments, one name for clients."""

    name: str
    fingerprint: str
    """Hex digest over its base, its scales and its tensors; salts its cached prefixes."""
    rank: int
    """Largest rank of its matrices; 0: all are in few bits."""
    in_few_bits: bool = False
    """Whether some of its changes are whole matrices in few bits, for CPUs alone."""


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


SCORE = "score"
"""`ModelSpec.pooling` of a cross encoder."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of one size per sequence that a module carries from token to token."""

    module: str
    """Path of the module."""
    kind: str
    """`conv`: last inputs of a convolution, in the model's dtype; `recurrent`: in float32."""
    index: int
    """Number among the module's states of that kind."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """KV of a token in one layer that attends."""

    layer: int
    heads: int
    size: int
    """Elements of a head's key, and of its value."""
    latent: bool = False
    """Whether a value is the beginning of its key, which alone is kept."""
    source: int | None = None
    """Layer whose KV it reads in place of its own; None: it has its own."""
    group: int = 0
    """Which of a step's blocks has it (`ModelSpec.kv_windows`)."""

    @property
    def kept(self) -> int:
        """Keys and values of heads that the layer keeps of a token."""
        return 0 if self.source is not None else (2 - self.latent) * self.heads

    @property
    def elements(self) -> int:
        """Elements that the layer keeps of a token."""
        return self.kept * self.size


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
    kv_dtype: str = "auto"
    """`int8`: KV in 8 bits, each head's key and value of a token with a scale; `auto`: `dtype`."""
    max_model_len: int
    block_tokens: int
    segment_bytes: tuple[int, ...]
    """Packed bytes of each segment, in load order: embeddings, layer 0 .. n-1, head (if untied),
    then one for each adapter."""
    parameters: int = 0
    """Number of parameters, without adapters; 0: unknown."""
    stored_in: str = ""
    """Type in which the checkpoint has most of them: `BF16`, a format of quantised safetensors as
    `AWQ int4`, or one of a GGUF file as `GGUF Q4_K`; empty: unknown."""
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
    pooling: str = ""
    """How an encoder makes one vector of a text, which it computes whole: `cls`, `mean` or `last`;
    `score`: it scores a pair of texts. Empty: it is a decoder."""
    ranks: int = 1
    """Ranks of a tensor-parallel group that share it. Heads, intermediate and segments, and sizes
    derived from them, are then one rank's part; `hidden` and `vocab` are whole."""
    experts_per_token: int = 0
    """Experts that a token goes through in a layer; 0: the model has no experts."""
    expert_intermediate: int = 0
    attention_layers: tuple[int, ...] = ()
    """Layers that attend, and so have KV; empty: all do."""
    layer_kv: tuple[LayerKv, ...] = ()
    """KV of each layer that attends, where these differ or keep less than `kv_heads` keys and
    values of `head_dim`, in which the KV of every layer fits; empty: all keep just that."""
    kv_windows: tuple[int | None, ...] = ()
    """Sliding window of each group of layers, positions that a query sees; None: all. Each group
    has blocks of its own, of one size, so that those behind its window go. Empty: one group."""
    states: tuple[StateTensor, ...] = ()
    """Recurrent state of a sequence, which lies in each of its blocks beside KV."""
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

    def head_bytes(self, size: int) -> int:
        """Return the bytes of a head's key, or of its value, of `size` elements."""
        return size + KV_SCALE_BYTES if self.kv_dtype == INT8 else size * self.dtype_bytes

    @property
    def kv_layers(self) -> int:
        """Number of layers that have KV."""
        return len(self.attention_layers) or self.n_layers

    @property
    def kv_groups(self) -> int:
        """Blocks of `block_tokens` tokens: one for each group of layers."""
        return len(self.kv_windows) or 1

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in blocks of all groups."""
        if not self.layer_kv:
            return self.kv_layers * 2 * self.kv_heads * self.head_bytes(self.head_dim)
        n_bytes = [0] * self.kv_groups
        for kv in self.layer_kv:
            n_bytes[kv.group] += kv.kept * self.head_bytes(kv.size)
        return self.kv_groups * max(n_bytes)

    def kept_tokens(self, window: int) -> int:
        """Return the tokens before a sequence's next one that a group with `window` keeps."""
        return max(window, 2 * self.block_tokens)

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks that a sequence of so many tokens holds, at most."""
        steps = ceil_div(tokens, self.block_tokens)
        if not self.kv_windows:
            return steps
        chunk = self.job_memory.step_tokens if self.job_memory else tokens
        within = (
            steps
            if window is None
            else min(steps, ceil_div(self.kept_tokens(window) + chunk, self.block_tokens) + 1)
            for window in self.kv_windows
        )
        return sum(within)

    def tokens_in(self, blocks: int) -> int:
        """Return the tokens of the longest sequence that holds at most so many blocks."""
        if not self.kv_windows:
            return blocks * self.block_tokens
        steps = range(1, ceil_div(self.max_model_len, self.block_tokens) + 1)
        of_steps = lambda n: self.blocks_of(n * self.block_tokens)  # noqa: E731
        return bisect_right(steps, blocks, key=of_steps) * self.block_tokens

    @property
    def kv_bytes_per_token(self) -> int:
        """`token_bytes`, and a token's share of its block's recurrent state."""
        return self.token_bytes + ceil_div(self.state_bytes, self.block_tokens)

    @property
    def state_places(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of each of `states` in a block."""
        found, at = [], STATE_LINE
        for state in self.states:
            n_bytes = math.prod(state.shape) * (
                4 if state.kind == "recurrent" else self.dtype_bytes
            )
            found.append((at, n_bytes))
            at += ceil_div(n_bytes, STATE_LINE) * STATE_LINE
        return tuple(found)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state in each block, before its KV; 0: there is none."""
        if not self.states:
            return 0
        at, n_bytes = self.state_places[-1]
        return at + ceil_div(n_bytes, STATE_LINE) * STATE_LINE

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of `block_tokens` tokens, all layers of a group."""
        return self.token_bytes // self.kv_groups * self.block_tokens + self.state_bytes

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

    def guaranteed_kv(self, page_bytes: int, in_place: bool = False) -> int:
        """Return the pages of KV that are the model's alone, of each rank: those that its weights
        leave of its guarantee; weights read `in_place` take none."""
        if not self.guarantee:
            return 0
        pages = ceil_div(self.guarantee, page_bytes * self.ranks)
        return max(0, pages - (0 if in_place else self.weight_pages(page_bytes)))

    def most_kv(self, page_bytes: int) -> int | None:
        """Return the most pages of KV, of each rank, that its limit leaves beside its weights,
        which may come onto pages where passes read them in place too; None: no bound."""
        if self.limit is None:
            return None
        pages = self.limit // (page_bytes * self.ranks)
        return max(0, pages - self.weight_pages(page_bytes))


def uniform_kv(spec: ModelSpec) -> ModelSpec:
    """Return a spec whose layers all keep K and V of all heads, for all of the context."""
    return replace(spec, layer_kv=(), kv_windows=())


def plain_kv(spec: ModelSpec) -> ModelSpec:
    """Return a spec whose blocks have all layers, and stay behind windows."""
    layers = tuple(replace(kv, group=0) for kv in spec.layer_kv)
    whole = {LayerKv(kv.layer, spec.kv_heads, spec.head_dim) for kv in layers}
    return replace(spec, layer_kv=() if whole == {*layers} else layers, kv_windows=())


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
