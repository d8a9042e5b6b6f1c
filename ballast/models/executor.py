"""Run the jobs of one model: compute logits, then sample tokens (the base of all executors).

Runners of live devices call it on a lane's thread. Subclasses compute logits: `FusedModel`,
`TransformersModel`, `GpuExecutor`, and ranks of groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise, InvalidRequest, NonFiniteOutput
from ballast.core.event import EmbeddingOutput, FailedOutput, JobResult, PromptScoresOutput
from ballast.core.job import SampledToken, SequenceWork
from ballast.core.model import INT8
from ballast.core.request import Sampling
from ballast.kernels import sampling
from ballast.kernels.paged_attention import KvArray, LayerPlaces, PagedBatch
from ballast.kernels.sampling import NoToken
from ballast.kv.layout import Layout
from ballast.models.barriers import Barriers, carried
from ballast.models.grammar import Grammars, Matcher
from ballast.models.layer_arrays import arrays_of
from ballast.weights.host import HostModel
from ballast.weights.packing import DTYPES

Array = np.ndarray[Any, Any]

UNSCORED: tuple[None, tuple[()]] = (None, ())


class ModelExecutor(ABC):
    """Runs the jobs of one model (`ballast.live.runner.Executor`).

    One job at a time; different models may run at the same time on different threads.
    """

    def __init__(self, host: HostModel, kv_base: int, layout: Layout) -> None:
        """`kv_base`: address of block 0, which need not be backed by memory yet."""
        self.spec = spec = host.spec
        self.barriers: Barriers | None = None
        """Barriers at layers whose weights or KV stream; None: none ever does."""
        self.grammars = Grammars(host.directory, spec.vocab, spec.eos_token_ids, host.tokenizer)
        self.dtype = dtype = DTYPES[spec.dtype]
        if layout.stride_bytes % dtype.itemsize:
            raise BrokenPromise(f"{spec.name}: blocks are {layout.stride_bytes} bytes apart")
        kept = torch.int8 if spec.kv_dtype == INT8 else dtype
        whole = KvArray(
            kv_base + layout.state_bytes,
            layout.stride_bytes // kept.itemsize,
            spec.kv_layers,
            spec.block_tokens,
            spec.kv_heads,
            spec.head_dim,
            kept,
        )
        self._arrays = arrays_of(spec, whole)
        """KV of the layers, those with equal heads together."""
        self._kv = self._arrays[0].kv
        sampling.warm_up()

    @abstractmethod
    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        """Return logits (n, vocab) float32, of each position that `work` wants, in its order.

        Computes KV for all of `work`. The result is valid until the next call.
        """

    @abstractmethod
    def hidden(self, work: Sequence[SequenceWork]) -> Tensor:
        """Return the head's input (n, hidden) of each position that `work` wants.

        Otherwise as `logits`.
        """

    def run(self, work: Sequence[SequenceWork]) -> list[JobResult]:
        """Compute KV for all of `work`, and sample the sequences that require it, in order.

        Where the model computes what is not finite for a sequence, its result is a `FailedOutput`;
        the others' results are not affected. A job without any token moves blocks of KV.
        """
        barriers = self.barriers
        if barriers is None:
            return self._run(work)
        if not any(w.tokens for w in work):
            barriers.move()
            return []
        try:
            return self._run(work)
        finally:
            barriers.finish()

    def _run(self, work: Sequence[SequenceWork]) -> list[JobResult]:
        results: list[JobResult] = []
        embedded = [w for w in work if w.embed]
        if embedded:
            results += self._embedded(embedded)
            work = [w for w in work if not w.embed]
            if not work:
                return results
        logits = self.logits(work)
        sampled = [w for w in work if w.sample is not None]
        if any(w.scoring is not None for w in work):
            logits = logits.cpu()
            results += self._scores(work, logits)
            unscored = {r.request_id for r in results if isinstance(r, FailedOutput)}
            ends = (np.cumsum([len(w.wanted) for w in work]) - 1).tolist()
            sampled = [w for w in sampled if w.request_id not in unscored]
            ids = {w.request_id for w in sampled}
            logits = logits[[e for w, e in zip(work, ends, strict=True) if w.request_id in ids]]
        if not sampled:
            return results
        shapes, matchers, failed = self._shapes(sampled)
        params = [w.sample for w in sampled if w.sample is not None]
        tokens, scores = self.choose(logits, params, [w.end for w in sampled], shapes)
        for i, w in enumerate(sampled):
            token = tokens[i]
            if i in failed:
                results.append(failed[i])
            elif isinstance(token, NoToken):
                results.append(self._no_token(w, token))
            else:
                ends = i in matchers and matchers[i].ends(token)
                logprob, top = scores.get(i, UNSCORED)
                results.append(SampledToken(w.request_id, token, logprob, top, ends))
        return results

    def _no_token(self, w: SequenceWork, why: NoToken) -> FailedOutput:
        if why is NoToken.NOT_FINITE:
            return self._not_finite(w, "logits")
        reason = "its biases, penalties and grammar leave no token that could come next"
        return FailedOutput(w.request_id, InvalidRequest.code, reason)

    def _not_finite(self, w: SequenceWork, what: str) -> FailedOutput:
        name = self.spec.name if w.adapter is None else self.spec.adapters[w.adapter].name
        error = NonFiniteOutput(name, what)
        return FailedOutput(w.request_id, error.code, str(error))

    def expert_bytes(self, layer: int) -> int:
        """Return the bytes of all experts of a layer; 0: it has none, or they are always read."""
        return 0

    def chosen_bytes(self, layer: int) -> int:
        """Return the bytes of the experts that the current pass, having run a layer, has chosen."""
        return 0

    def stalled(self) -> float:
        """Return the seconds that jobs have waited for layers since the last call."""
        return 0.0 if self.barriers is None else self.barriers.stalled()

    def carried(self) -> tuple[float, float]:
        """Return the seconds for which links carried what jobs read elsewhere, and what they wrote
        there, since the last call."""
        return carried(self.barriers)

    def _begin_pass(self, work: Sequence[SequenceWork]) -> Collection[int]:
        """Return the layers at which the pass that begins has to call `barriers`."""
        return () if self.barriers is None else self.barriers.begin_pass(work)

    def choose(
        self,
        logits: Tensor,
        params: Sequence[Sampling],
        positions: Sequence[int],
        shapes: Mapping[int, sampling.SamplingContext],
    ) -> tuple[list[int | NoToken], dict[int, sampling.Scores]]:
        """Sample as `sampling.sample` does; called by `run` with the tensor that `logits`
        returned."""
        return sampling.sample(logits, params, positions, shapes)

    def _embedded(self, work: Sequence[SequenceWork]) -> list[EmbeddingOutput | FailedOutput]:
        unit = torch.nn.functional.normalize(self.hidden(work).float(), dim=-1).numpy()
        finite = np.isfinite(unit).all(-1)
        return [
            EmbeddingOutput(w.request_id, unit[i].astype("<f4").tobytes())
            if finite[i]
            else self._not_finite(w, "embeddings")
            for i, w in enumerate(work)
        ]

    def _scores(
        self, work: Sequence[SequenceWork], logits: Tensor
    ) -> list[PromptScoresOutput | FailedOutput]:
        found: list[PromptScoresOutput | FailedOutput] = []
        at = 0
        for w in work:
            if w.scoring is not None:
                rows = range(at, at + len(w.scoring.targets))
                finite = logits[rows.start : rows.stop].amax(-1).isfinite().all()
                found.append(_scored(w, logits, rows) if finite else self._not_finite(w, "logits"))
            at += len(w.wanted)
        return found

    def _shapes(
        self, sampled: Sequence[SequenceWork]
    ) -> tuple[dict[int, sampling.SamplingContext], dict[int, Matcher], dict[int, FailedOutput]]:
        """Prepare sampling, by index in `sampled`: contexts of sequences whose logits are modified,
        matchers of those with a grammar, and failures of those whose grammar is at fault."""
        shapes: dict[int, sampling.SamplingContext] = {}
        matchers: dict[int, Matcher] = {}
        failed: dict[int, FailedOutput] = {}
        for i, w in enumerate(sampled):
            if w.history is None or w.sample is None:
                continue
            allowed = None
            if w.sample.grammar:
                output = w.history[w.prompt_tokens :]
                matchers[i] = self.grammars.matcher(w.request_id, output)
                try:
                    allowed = matchers[i].allowed(output)
                except InvalidRequest as error:
                    failed[i] = FailedOutput(w.request_id, error.code, str(error))
                    continue
            shapes[i] = sampling.SamplingContext(w.history, w.prompt_tokens, allowed)
        return shapes, matchers, failed

    def rows(self, work: Sequence[SequenceWork]) -> Rows:
        """Return the rows of a job. Raises BrokenPromise as `check`."""
        self.check(work)
        places = None if self.barriers is None else self.barriers.places(work)
        return Rows(self._kv, self.spec.n_heads, work, places)

    def check(self, work: Sequence[SequenceWork]) -> None:
        """Raise BrokenPromise if a sequence is longer than the model's context, or has a token
        outside of the vocabulary: kernels read the embeddings at tokens' addresses."""
        vocab = self.spec.vocab
        for w in work:
            if w.tokens and not 0 <= min(w.tokens) <= max(w.tokens) < vocab:
                raise BrokenPromise(f"{w.request_id}: a token is outside of the {vocab} known")
            if w.end > self.spec.max_model_len:
                raise BrokenPromise(
                    f"{w.request_id}: {w.end} tokens, the model has {self.spec.max_model_len}"
                )


def _scored(w: SequenceWork, logits: Tensor, rows: range) -> PromptScoresOutput:
    """Score a prompt's targets by their rows of `logits`."""
    scoring = w.scoring
    assert scoring is not None
    scores = sampling.scores(logits, rows, scoring.targets, [scoring.top] * len(rows))
    top = tuple(likeliest for _, likeliest in scores) if scoring.top else ()
    logprobs = tuple(own for own, _ in scores)
    return PromptScoresOutput(w.request_id, scoring.start, logprobs, top)


def wanted_rows(work: Sequence[SequenceWork]) -> list[int]:
    """Return the rows of a job for which the model's output is wanted."""
    wanted: list[int] = []
    first = 0
    for w in work:
        wanted += [first + row for row in w.wanted]
        first += len(w.tokens)
    return wanted


class Rows:
    """All T tokens of a job, one sequence after the other."""

    def __init__(
        self,
        kv: KvArray,
        heads: int,
        work: Sequence[SequenceWork],
        places: LayerPlaces | None = None,
    ) -> None:
        counts = [len(w.tokens) for w in work]
        starts = [w.start for w in work]
        self.paged = PagedBatch(kv, heads, starts, counts, [w.blocks for w in work], places)
        self.n = n = self.paged.n_tokens
        first = np.cumsum(counts) - counts
        self.wanted = np.array(wanted_rows(work), np.int64)
        """Rows for which the model's output is wanted."""
        self.tokens = np.fromiter((t for w in work for t in w.tokens), np.int64, n)
        # Position of a row: its index, minus its sequence's first row, plus its first position.
        shift = np.asarray(starts) - first
        self.positions: Array = np.arange(n) + np.repeat(shift, counts)
        """Position of each row in its sequence, int64 (T,)."""
        entries = [len(w.blocks) // kv.n_groups for w in work[:-1]]
        tables = np.repeat(np.cumsum([0, *entries]), counts)
        at = tables + self.positions // kv.block_tokens
        block = self.paged.tables[..., at].astype(np.int64)
        within = self.positions % kv.block_tokens
        self.places: Array = block * kv.block_stride + within * kv.token
        """Offset in elements, from K of a layer in block 0, of each row's K, int64 (T,); of each
        group, (groups, T), if there are several."""
