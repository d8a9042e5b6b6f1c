"""Estimate seconds of jobs and copies, and bytes of activations, by formulas with coefficients.

Used by policies, the engine and the simulator. Coefficients are measured or come from a profile.

The job formula follows the forms that fit measured GPUs best (a floor for reading the weights,
linear terms in tokens and in KV read, a step for each tile of sequences), extended to jobs that
mix prefill chunks and decodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field, replace

from ballast.core.job import Job, JobLoad, chunk_pairs
from ballast.core.model import JobMemory, ModelSpec
from ballast.core.omitted import OMITTED
from ballast.core.units import MiB, ceil_div

TILE = 64
"""Rows of a tile of a GPU's matrix products: up to TILE decoding sequences cost little more than
one; each further tile adds a step."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Expected request traffic of a model."""

    rate: float = 0.0
    """Requests per second."""
    prompt_tokens: float = 0.0
    """Mean per request."""
    output_tokens: float = 0.0
    """Mean per request."""

    def __add__(self, other: Traffic) -> Traffic:
        """Return the combined traffic; mean lengths are weighted by the rates."""
        rate = self.rate + other.rate
        share = self.rate / rate if rate else 0.5
        return Traffic(
            rate,
            share * self.prompt_tokens + (1 - share) * other.prompt_tokens,
            share * self.output_tokens + (1 - share) * other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Coefficients of the seconds of one job: a pass over the weights, plus terms of its work.

    ::

        without prefill   base + decode
        with prefill      max(floor, base - hidden + prefill) + decode
        prefill           T*per_token + S*per_pair + P*per_chunk
        decode            B*per_sequence + C*per_context + (ceil(B / 64) - 1)*per_tile

    `base` and `floor` are of passes that read all experts; one of R = T + B rows takes
    `expert_reading * not_chosen**R` less, where rows choose evenly, independent of each other.

    T: prefill tokens; B: decoding sequences; C: KV tokens these read; S: query-key pairs of
    prefill attention; P: prefill chunks. `base`: the pass over the weights and the host's own work;
    `hidden`: the part of it that overlaps with a prefill's arithmetic (negative if a prefill's pass
    costs more); `floor`: minimum of a prefill, however short; `per_chunk`: fixed cost of starting a
    prefill chunk. With `floor`, `hidden` and `per_tile` 0 the form is linear. A job that decodes
    beside a prefill makes one pass over the weights for both, never shorter than `base`.
    """

    base: float
    per_token: float
    per_sequence: float
    per_context: float
    per_pair: float
    per_chunk: float = 0.0
    floor: float = 0.0
    hidden: float = 0.0
    per_tile: float = 0.0
    expert_reading: float = field(default=0.0, metadata=OMITTED)
    """Part of `base` that reads experts; 0: the model has none."""
    not_chosen: float = field(default=0.0, metadata=OMITTED)
    """Probability that a row does not go through a given expert of a layer."""

    def of(self, load: JobLoad) -> float:
        tokens, chunks, pairs, sequences, context = load
        unread = self._unread(tokens + sequences)
        seconds = base = self.base - unread
        if tokens:
            # What is not read is not hidden either.
            work = tokens * self.per_token + pairs * self.per_pair + chunks * self.per_chunk
            seconds = self.base + work
            seconds = max(self.floor - unread, base if sequences else 0.0, seconds - self.hidden)
        if sequences:
            seconds += sequences * self.per_sequence + context * self.per_context
            seconds += (sequences - 1) // TILE * self.per_tile
        return seconds

    def decoding(self, sequences: int) -> Callable[[int], float]:
        """Return a function from `decode_context` to the seconds of a job that only decodes
        `sequences` (at least 1) sequences; equal to `of`, bit for bit."""
        base = self.base - self._unread(sequences)
        each, reads = sequences * self.per_sequence, self.per_context
        tiles = (sequences - 1) // TILE * self.per_tile
        return lambda context: base + (each + context * reads) + tiles

    def split(self, load: JobLoad) -> tuple[float, float]:
        """Split the seconds of a job into (arithmetic, reading of weights and KV).

        The pass over the weights and the KV that decodes read count as reading; the terms of tokens
        and sequences count as arithmetic.
        """
        seconds = self.of(load)
        rows = load.prefill_tokens + load.decode_sequences
        reading = self.base - self._unread(rows) + load.decode_context * self.per_context
        if load.prefill_tokens:
            reading -= max(0.0, self.hidden)
        reading = min(seconds, max(0.0, reading))
        return seconds - reading, reading

    def _unread(self, rows: int) -> float:
        """Return the seconds for which experts would be read that no row has chosen."""
        return self.expert_reading * self.not_chosen**rows if self.expert_reading else 0.0

    def seconds(self, job: Job) -> float:
        return self.of(job.load)

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        """Return the seconds to prefill `tokens` positions of a sequence from position `start`."""
        return self.of(JobLoad(tokens, 1, chunk_pairs(tokens, start), 0, 0))

    def prefilling(self) -> Callable[[int], float]:
        """Return `prefill_seconds` from position 0 as a function, for many requests; equal to it,
        bit for bit."""
        if self.expert_reading:
            return self.prefill_seconds
        base, least, hidden = self.base, max(self.floor, 0.0), self.hidden
        each, pair, chunk = self.per_token, self.per_pair, self.per_chunk

        def seconds(tokens: int) -> float:
            if not tokens:
                return base
            work = tokens * each + tokens * (tokens + 1) // 2 * pair + chunk
            return max(least, base + work - hidden)

        return seconds

    def work(self, traffic: Traffic, tpot: float, most: int) -> float:
        """Estimate the load of `traffic` on a device that serves nothing else, in compute seconds
        per second.

        Assumes the largest decode batch, up to `most`, whose step takes 0.8 `tpot` seconds at most:
        prefills have the rest of the time.
        """
        context = round(traffic.prompt_tokens + traffic.output_tokens / 2)

        def step(batch: int) -> float:
            return self.of(JobLoad(0, 0, 0, batch, batch * context))

        batch = max(1, bisect_right(range(1, most + 1), 0.8 * tpot, key=step))
        prefill = self.prefill_seconds(round(traffic.prompt_tokens))
        return traffic.rate * (prefill + traffic.output_tokens * step(batch) / batch)

    def after(self, seconds: float) -> StepCosts:
        """Return the costs with every job longer by `seconds`."""
        return replace(self, base=self.base + seconds, floor=self.floor + seconds)

    def scaled(self, factor: float) -> StepCosts:
        """Return the costs with all times multiplied by `factor`."""
        return replace(StepCosts(*(factor * a for a in astuple(self))), not_chosen=self.not_chosen)


UNMEASURED = StepCosts(2e-3, 2e-4, 2e-4, 1e-8, 1e-9)
"""Default until a model has been measured; the order of magnitude is that of a small CPU."""


def copy_seconds(n_bytes: int, bytes_per_second: float) -> float:
    """Return the seconds of a copy that has its link to itself (beside others: `core/link.py`)."""
    return n_bytes / bytes_per_second


def lane_bytes(specs: Iterable[ModelSpec], step_tokens: int, step_logits: int) -> int:
    """Return the bytes of activations to set aside for a lane that runs jobs of these models in
    turns.

    Memory kept between jobs remains while another model's job runs, so the maxima of kept and of
    freed memory are added.
    """
    needs = [job_memory(spec, step_tokens, step_logits) for spec in specs]
    kept = max((need.kept for need in needs), default=0)
    return kept + max((need.freed for need in needs), default=0)


def activation_bytes(spec: ModelSpec, step_tokens: int, step_logits: int) -> int:
    """Return the bytes of activations to set aside for a lane that runs jobs of one model only."""
    return job_memory(spec, step_tokens, step_logits).n_bytes


def job_memory(spec: ModelSpec, step_tokens: int, step_logits: int) -> JobMemory:
    """Return the memory that jobs of up to `step_tokens` tokens and `step_logits` samples allocate:
    as measured, if jobs of that size were measured; else an upper estimate.
    """
    measured = spec.job_memory
    if measured is not None and (
        step_tokens <= measured.step_tokens and step_logits <= measured.step_logits
    ):
        return measured
    return JobMemory(
        step_tokens=step_tokens,
        step_logits=step_logits,
        kept=0,
        freed=_estimated_bytes(spec, step_tokens, step_logits),
    )


def _estimated_bytes(spec: ModelSpec, step_tokens: int, step_logits: int) -> int:
    """Return an upper bound of the bytes that a job of this size allocates, on any path and CPU.

    Used where no job can be measured: for planned or simulated models, on GPUs, in groups of ranks.
    Sums the memory that lives through a whole job and the maximum over a decoder's phases, which
    run as separate operations. Several times the peak where a CPU multiplies bfloat16 natively or
    an activation is one operation.
    """
    t, e, f = step_tokens, spec.dtype_bytes, 4
    hidden, q, k = (
        t * spec.hidden,
        t * spec.n_heads * spec.head_dim,
        t * spec.kv_heads * spec.head_dim,
    )
    # Embeddings, a layer's input, attention's output; cos and sin; ids and positions.
    through = e * (2 * hidden + q) + 2 * e * t * spec.head_dim + 2 * 8 * t
    rotary = f * t * spec.head_dim * 4
    norm = 3 * f * hidden + 2 * e * hidden
    # Projections, and while one of q and k is rotated: halves swapped, two products, their sum.
    attention = e * (hidden + 2 * q + 2 * k + 4 * q) + e * hidden
    # Gate and up, in one matrix or two; then temporaries of activations written in Python, or
    # oneDNN's sums of bfloat16 products: families need 3 to 7.7 times the intermediate size.
    mlp = e * (3 * hidden + 8 * t * spec.intermediate)
    # A row for each of a token's experts: its input and the same; later input, output, weighted,
    # back in the tokens' order. Routing sorts indices of these rows.
    rows = t * spec.experts_per_token
    gated = e * (spec.hidden + 8 * spec.expert_intermediate)
    weighted = 2 * (e + f) * spec.hidden
    experts = 2 * e * hidden + rows * (max(gated, weighted) + 8 * 8)
    # Logits in the model's dtype and in float32; a copy and its log-softmax where asked for.
    head = step_logits * spec.vocab * ((e if e != f else 0) + 3 * f) + 8 * 8 * spec.vocab
    # The product between an adapter's two matrices; indices of the rows of each adapter.
    if spec.adapters:
        through += t * (f * max(a.rank for a in spec.adapters) + 8 * 8)
        if any(a.in_few_bits for a in spec.adapters):  # inputs and a product in float32
            through += t * f * 2 * max(spec.hidden, spec.intermediate)
    bound = through + max(rotary, norm, attention, mlp, experts, head)
    if not spec.experts_per_token:
        bound = max(bound, _fused_bytes(spec, step_tokens, step_logits))
    return bound + ceil_div(bound, 8) + 2 * MiB


def _fused_bytes(spec: ModelSpec, t: int, step_logits: int) -> int:
    """Return this bound for the fast path: its float32 workspace and a library's temporaries."""
    q, k, inner = spec.n_heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate
    workspace = 4 * t * (2 * spec.hidden + 2 * q + 2 * k + spec.head_dim + 3 * inner + 6)
    library = t * 2 * inner * (4 if spec.dtype_bytes == 4 else 6)
    logits = 4 * step_logits * spec.vocab
    if spec.ranks > 1:  # its part of each sum and of the logits, and all ranks' parts
        workspace += 4 * t * spec.hidden * (1 + spec.ranks)
        workspace += 2 * (logits + 4 * step_logits * 64 * spec.ranks)
    return workspace + logits + max(library, 2 * logits + 8 * 8 * spec.vocab)
