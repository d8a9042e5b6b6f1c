"""Run encoders of BERT's kind on CPU: embeddings of texts, and scores of pairs of texts.

A text is computed whole, in one job, by `transformers`' own forward; texts of equal length
together, so that nothing is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.core.event import EmbeddingOutput, FailedOutput
from ballast.core.job import SequenceWork
from ballast.core.model import SCORE
from ballast.kv.layout import Layout
from ballast.models.transformers import TransformersModel
from ballast.weights.host import HostModel


class EncoderModel(TransformersModel):
    """Runs the jobs of an encoder, of which each asks for embeddings or scores alone."""

    def __init__(
        self, host: HostModel, segment_addresses: Sequence[int], kv_base: int, layout: Layout
    ) -> None:
        super().__init__(host, segment_addresses, kv_base, layout)
        types = getattr(host.config, "type_vocab_size", 0)
        known = signature(type(self._module).forward).parameters
        self._second = 1 if types > 1 and "token_type_ids" in known else 0
        """Type of tokens of the second text of a pair."""

    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        raise BrokenPromise(f"{self.spec.name} is an encoder: it generates nothing")

    @torch.inference_mode()
    def hidden(self, work: Sequence[SequenceWork]) -> Tensor:
        """Return the vector of each text, (n, hidden); of a cross encoder its logit, (n, 1)."""
        self.check(work)
        by_length: dict[int, list[int]] = defaultdict(list)
        for i, w in enumerate(work):
            if w.start:
                raise BrokenPromise(f"{w.request_id}: an encoder cannot go on from {w.start}")
            by_length[len(w.tokens)].append(i)
        found: dict[int, Tensor] = {}
        for same in by_length.values():
            texts = [work[i] for i in same]
            self._stops = self._begin_pass(texts)
            pooled = _pool(self._module, texts, self.spec.pooling, self._second)
            found.update(zip(same, pooled, strict=True))
        return torch.stack([found[i] for i in range(len(work))])

    def _embedded(self, work: Sequence[SequenceWork]) -> list[EmbeddingOutput | FailedOutput]:
        if self.spec.pooling != SCORE:
            return super()._embedded(work)
        scores = self.hidden(work).float()
        return [
            EmbeddingOutput(w.request_id, row.numpy().astype("<f4").tobytes())
            if bool(row.isfinite().all())
            else self._not_finite(w, "scores")
            for w, row in zip(work, scores, strict=True)
        ]


def _pool(module: Any, work: Sequence[SequenceWork], pooling: str, second: int) -> Tensor:
    """Return the vectors of texts of equal length; `second`: type of a second text's tokens, or
    0 for a module without types."""
    ids = torch.tensor([w.tokens for w in work])
    more = {}
    if second:
        places = torch.arange(ids.shape[1])
        begins = torch.tensor([[w.second_text or ids.shape[1]] for w in work])
        more["token_type_ids"] = (places >= begins).long()
    output = module(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    if pooling == SCORE:
        scores: Tensor = output.logits
        return scores
    states: Tensor = output.last_hidden_state
    if pooling == "mean":
        return states.float().mean(1)
    return states[:, -1 if pooling == "last" else 0]
