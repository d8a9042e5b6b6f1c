"""Formulas of cost, in seconds. Coefficients are measured or come from a profile.

The job formula follows the forms that fit measured GPUs best (a floor for reading the weights,
linear terms in tokens and in KV read, a step for each tile of sequences), extended to jobs that
mix prefill chunks and decodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace

from ballast.core.job import Job, JobLoad, chunk_pairs
from ballast.core.model import JobMemory, ModelSpec
from ballast.core.units import MiB, ceil_div

TILE = 64
"""Rows of a tile of a GPU's matrix products: that many decoding sequences cost little more than
one, and the next tile's worth costs a step."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a model is expected to be asked."""

    rate: float = 0.0
    """Requests per second."""
    prompt_tokens: float = 0.0
    """Per request, on average."""
    output_tokens: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        """Both together, requests of either counting by their rate."""
        rate = self.rate + other.rate
        share = self.rate / rate if rate else 0.5
        return Traffic(
            rate,
            share * self.prompt_tokens + (1 - share) * other.prompt_tokens,
            share * self.output_tokens + (1 - share) * other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of one job: a pass over the weights, and what its work adds to that.

    ::

        without prefill   base + decode
        with prefill      max(floor, base - hidden + prefill) + decode
        prefill           T*per_token + S*per_pair + P*per_chunk
        decode            B*per_sequence + C*per_context + (ceil(B / 64) - 1)*per_tile

    T: prefill tokens; B: decoding sequences; C: KV tokens these read; S: query-key pairs of
    prefill attention; P: prefill chunks. `base` holds the pass over the weights and the host's own
    work, `hidden` the part of it that a prefill's arithmetic covers (negative where a prefill's
    pass costs more), `floor` the least a prefill takes however short it is; `per_chunk` what a
    prefill costs for beginning where something else ran before. With `floor`, `hidden` and
    `per_tile` 0 the form is linear. A job that decodes beside a prefill makes one pass over the
    weights for both, never shorter than `base`.
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

    def of(self, load: JobLoad) -> float:
        tokens, chunks, pairs, sequences, context = load
        seconds = self.base
        if tokens:
            seconds += tokens * self.per_token + pairs * self.per_pair + chunks * self.per_chunk
            seconds = max(self.floor, self.base if sequences else 0.0, seconds - self.hidden)
        if sequences:
            seconds += sequences * self.per_sequence + context * self.per_context
            seconds += (sequences - 1) // TILE * self.per_tile
        return seconds

    def decoding(self, sequences: int) -> Callable[[int], float]:
        """Return what takes the context of a job that only decodes so many sequences, at least 1,
        and returns its seconds: those of `of`, to the last bit."""
        base, each, reads = self.base, sequences * self.per_sequence, self.per_context
        tiles = (sequences - 1) // TILE * self.per_tile
        return lambda context: base + (each + context * reads) + tiles

    def split(self, load: JobLoad) -> tuple[float, float]:
        """Of the seconds of a job, those of arithmetic and those of reading weights and KV.

        The pass over the weights and what decodes read of KV count as reading; what tokens and
        sequences add, as arithmetic.
        """
        seconds = self.of(load)
        reading = self.base + load.decode_context * self.per_context
        if load.prefill_tokens:
            reading -= max(0.0, self.hidden)
        reading = min(seconds, max(0.0, reading))
        return seconds - reading, reading

    def seconds(self, job: Job) -> float:
        return self.of(job.load)

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        """To compute `tokens` more positions of one sequence that has `start` of them."""
        return self.of(JobLoad(tokens, 1, chunk_pairs(tokens, start), 0, 0))

    def work(self, traffic: Traffic, tpot: float, most: int) -> float:
        """Share of a device that `traffic` takes, roughly, if nothing else is served there.

        Of its time, in seconds per second, when as many requests decode together as `most` and a
        step of 0.8 `tpot` seconds allow: prefills have the rest.
        """
        context = round(traffic.prompt_tokens + traffic.output_tokens / 2)

        def step(batch: int) -> float:
            return self.of(JobLoad(0, 0, 0, batch, batch * context))

        batch = max(1, bisect_right(range(1, most + 1), 0.8 * tpot, key=step))
        prefill = self.prefill_seconds(round(traffic.prompt_tokens))
        return traffic.rate * (prefill + traffic.output_tokens * step(batch) / batch)

    def after(self, seconds: float) -> StepCosts:
        """Every job takes so much longer."""
        return replace(self, base=self.base + seconds, floor=self.floor + seconds)

    def scaled(self, factor: float) -> StepCosts:
        """Everything takes `factor` times as long."""
        return StepCosts(*(factor * a for a in astuple(self)))


UNMEASURED = StepCosts(2e-3, 2e-4, 2e-4, 1e-8, 1e-9)
"""Stands in until a model has been measured; right to an order of magnitude on a small CPU."""


def copy_seconds(n_bytes: int, bytes_per_second: float) -> float:
    """Time of a copy alone on its link; `core/link.py` says what it has beside others."""
    return n_bytes / bytes_per_second


def lane_bytes(specs: Iterable[ModelSpec], step_tokens: int, step_logits: int) -> int:
    """Bytes of activations to set aside for a lane that runs jobs of these models in turns.

    What one model's jobs keep stays while another's job runs, so the largest of each is added up.
    """
    needs = [job_memory(spec, step_tokens, step_logits) for spec in specs]
    kept = max((need.kept for need in needs), default=0)
    return kept + max((need.freed for need in needs), default=0)


def activation_bytes(spec: ModelSpec, step_tokens: int, step_logits: int) -> int:
    """Bytes of activations to set aside for a lane that runs jobs of this model alone."""
    return job_memory(spec, step_tokens, step_logits).n_bytes


def job_memory(spec: ModelSpec, step_tokens: int, step_logits: int) -> JobMemory:
    """What jobs of up to `step_tokens` tokens and `step_logits` samples allocate.

    As measured, if that was done for jobs of that size; else an estimate from above.
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
    """Upper bound of what a largest job allocates, on whichever path and CPU it runs.

    Stands in where no job can be run: for models that are planned or simulated, on GPUs, and in
    groups of ranks. The phases of a decoder run as separate operations: what lives through all of
    a job, and the most that any one phase holds beside it. It is generous where a CPU multiplies
    bfloat16 natively, and where a family's activation is one operation: several times the peak.
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
    # Gate and up, in one matrix or two; then what activations written in Python hold on to, or what
    # oneDNN accumulates bfloat16 products in: families need 3 to 7.7 times the intermediate size.
    mlp = e * (3 * hidden + 8 * t * spec.intermediate)
    # A row for each of a token's experts: its input and the same; later input, output, weighted,
    # back in the tokens' order. Routing sorts indices of these rows.
    rows = t * spec.experts_per_token
    gated = e * (spec.hidden + 8 * spec.expert_intermediate)
    weighted = 2 * (e + f) * spec.hidden
    experts = 2 * e * hidden + rows * (max(gated, weighted) + 8 * 8)
    # Logits in the model's dtype and in float32; a copy and its log-softmax where asked for.
    head = step_logits * spec.vocab * ((e if e != f else 0) + 3 * f) + 8 * 8 * spec.vocab
    # What is between an adapter's two matrices; which rows go through which.
    if spec.adapters:
        through += t * (f * max(a.rank for a in spec.adapters) + 8 * 8)
    bound = through + max(rotary, norm, attention, mlp, experts, head)
    if not spec.experts_per_token:
        bound = max(bound, _fused_bytes(spec, step_tokens, step_logits))
    return bound + ceil_div(bound, 8) + 2 * MiB


def _fused_bytes(spec: ModelSpec, t: int, step_logits: int) -> int:
    """The same on the fast path: its workspace, float32, and what a library's matrices take."""
    q, k, inner = spec.n_heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate
    workspace = 4 * t * (2 * spec.hidden + 2 * q + 2 * k + spec.head_dim + 3 * inner + 6)
    library = t * 2 * inner * (4 if spec.dtype_bytes == 4 else 6)
    logits = 4 * step_logits * spec.vocab
    if spec.ranks > 1:  # its part of each sum and of the logits, and all ranks' parts
        workspace += 4 * t * spec.hidden * (1 + spec.ranks)
        workspace += 2 * (logits + 4 * step_logits * 64 * spec.ranks)
    return workspace + logits + max(library, 2 * logits + 8 * 8 * spec.vocab)
