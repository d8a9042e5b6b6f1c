"""Sample from logits on a GPU, with the same tokens as `sampling.sample` and few rows copied.

Used by the GPU executor. A token is a function of logits, parameters, seed and position alone, and
`sampling.py`, on the host, defines it. The device decides only tokens that provably equal the
host's:

- Greedy: the first of the largest logits, exact on either; where that is not finite, the host
  decides.
- Temperature alone: Gumbel-max in float32 with a bound of each score's error. Where the best score
  less its error is above every other plus its own, the token is the host's.
- With top-k, min-p or top-p: the device moves a row's `CANDIDATES` largest logits, and the host
  decides among them, if all that these leave are surely there. For top-p alone the sum over the
  whole row is the device's, with a bound of its error.

All other rows are copied to the host whole and decided there: rows that are too close, rows with
log-probabilities, and rows that penalties, biases or grammars modify.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ballast.core.request import Sampling
from ballast.core.units import MiB
from ballast.kernels import sampling

Array = np.ndarray[Any, Any]

CANDIDATES = 1024
"""Number of a row's largest logits that are copied to the host for top-k, min-p or top-p."""
CHUNK_BYTES = 8 * MiB
"""Logits in bytes whose candidates are found at once; temporaries take three times as much."""
TOTAL_ERROR = 2.0**-14
"""Relative error bound of the sum of a row's weights. A weight exp(-x) in float32 is
within 2^-22 (1 + x) of itself, and all weights with x > 30 together are less than 2^-24 of a sum
over 2^19 tokens: 2^-17 would do."""


class GumbelMax(Protocol):
    """Gumbel-max over whole rows on a device."""

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        params: Sequence[Sampling],
        positions: Sequence[int],
    ) -> list[int | None]:
        """Return, for each of `rows` of `logits` (n, vocab) float32, the token of `sampling.sample`
        with these parameters (temperature and seed only), or None if it is not certain."""


def gumbel_max(device: torch.device) -> GumbelMax | None:
    """Choose Triton's kernel on a GPU that has Triton; None: such rows are sampled on the host."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    module = importlib.import_module("ballast.kernels.triton.sampling")
    made: GumbelMax = module.TritonGumbelMax()
    return made


class GpuSampler:
    """Samples, as `sampling.sample`, from logits on one GPU."""

    def __init__(self, device: torch.device, whole: GumbelMax | None = None) -> None:
        """`whole`: by default the device's."""
        self._device = device
        self._whole = whole or gumbel_max(device)
        self.moved = 0
        """Number of rows that were copied to the host whole."""

    def sample(
        self,
        logits: Tensor,
        params: Sequence[Sampling],
        positions: Sequence[int],
        shapes: Mapping[int, sampling.SamplingContext],
    ) -> tuple[list[int | sampling.NoToken], dict[int, sampling.Scores]]:
        """As `sampling.sample`."""
        if logits.device.type != self._device.type:
            return sampling.sample(logits, params, positions, shapes)
        found: dict[int, int | sampling.NoToken] = {
            **self._decided(logits, params, positions, shapes)
        }
        host = [i for i in range(len(params)) if i not in found]
        if not host:
            return [found[i] for i in range(len(params))], {}
        self.moved += len(host)
        rows = logits if len(host) == len(params) else logits[host]
        tokens, scores = sampling.sample(
            rows.cpu(),
            [params[i] for i in host],
            [positions[i] for i in host],
            {at: shapes[i] for at, i in enumerate(host) if i in shapes},
        )
        found |= dict(zip(host, tokens, strict=True))
        return [found[i] for i in range(len(params))], {host[at]: s for at, s in scores.items()}

    def _decided(
        self,
        logits: Tensor,
        params: Sequence[Sampling],
        positions: Sequence[int],
        shapes: Mapping[int, sampling.SamplingContext],
    ) -> dict[int, int]:
        """Return the tokens of rows that are certain without copying the rows to the host."""
        vocab = logits.shape[1]
        greedy: list[int] = []
        plain: list[int] = []
        limited: list[int] = []
        for i, p in enumerate(params):
            if i not in shapes and p.logprobs is None:
                drawn = limited if _is_limited(p, vocab) else plain
                (drawn if p.temperature > 0.0 else greedy).append(i)
        found: dict[int, int | None] = {}
        if greedy:
            # Of equals the first, as on the host.
            first = logits.argmax(-1)
            finite = logits.gather(1, first[:, None])[:, 0].isfinite()
            likeliest = torch.where(finite, first, -1).tolist()
            found |= {i: likeliest[i] if likeliest[i] >= 0 else None for i in greedy}
        if plain and self._whole is not None:
            given = [params[i] for i in plain], [positions[i] for i in plain]
            found |= dict(zip(plain, self._whole(logits, plain, *given), strict=True))
        found |= self._among_candidates(logits, limited, params, positions)
        return {i: token for i, token in found.items() if token is not None}

    def _among_candidates(
        self,
        logits: Tensor,
        rows: Sequence[int],
        params: Sequence[Sampling],
        positions: Sequence[int],
    ) -> dict[int, int | None]:
        vocab = logits.shape[1]
        n = max(1, CHUNK_BYTES // (logits.element_size() * vocab))
        found: dict[int, int | None] = {}
        for begin in range(0, len(rows), n):
            part = list(rows[begin : begin + n])
            chosen = logits[part]
            values, tokens = chosen.topk(min(CANDIDATES, vocab))
            by = torch.tensor([[1.0 / params[i].temperature] for i in part], dtype=torch.float32)
            weights = chosen.sub_(values[:, :1]).mul_(by.to(logits.device)).exp_()
            totals = weights.sum(-1, dtype=torch.float64).tolist()
            each = zip(part, values.cpu().numpy(), tokens.cpu().numpy(), totals, strict=True)
            for i, value, token, total in each:
                found[i] = draw_among(value, token, params[i], positions[i], total, vocab)
        return found


def draw_among(
    values: Array, tokens: Array, p: Sampling, position: int, total: float, vocab: int
) -> int | None:
    """Draw, as `sampling.sample`, from a row's largest logits; None: they do not decide it.

    `values` (k,) float32: the k largest of `vocab`, those of `tokens` (k,) int64; `total`: the sum
    of exp((logit - largest) / temperature) over the row, within `TOTAL_ERROR`.
    """
    if np.isnan(values).any() or not np.isfinite(values.max()):
        return None
    by_token = np.argsort(tokens)
    values, tokens = values[by_token], tokens[by_token]
    whole = len(values) == vocab
    kept = sampling.limited(values, p)
    if not len(kept) and not whole:
        if p.min_p > 0.0 or 0 < p.top_k < vocab:
            return None
        chosen = _sure_nucleus(values, p, total, vocab)
        if chosen is None:
            return None
        return sampling.draw(values[chosen], tokens[chosen], p, position)
    if len(kept):
        # Of those with the least logit that was moved, some may be missing.
        if not whole and values[kept].min() <= values.min():
            return None
        values, tokens = values[kept], tokens[kept]
    if p.top_p < 1.0:
        chosen = sampling.nucleus(values, p)
        values, tokens = values[chosen], tokens[chosen]
    return sampling.draw(values, tokens, p, position)


def _sure_nucleus(values: Array, p: Sampling, total: float, vocab: int) -> Array | None:
    """Return `sampling.nucleus` of the row whose largest logits these are; None: not certain."""
    weights = sampling.weights_of(values, p)
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order])
    above = reached >= p.top_p * total * (1.0 + TOTAL_ERROR)
    if not above.any():
        return None
    last = int(above.argmax())
    rarest = weights[order[last]]
    # Nothing beside these comes before it, and it is none of those that are not looked at.
    if rarest <= weights.min() or rarest < (1.0 - p.top_p) * total * (1.0 + TOTAL_ERROR) / vocab:
        return None
    if last and reached[last - 1] >= p.top_p * total * (1.0 - TOTAL_ERROR):
        return None
    return order[: last + 1]


def _is_limited(p: Sampling, vocab: int) -> bool:
    """Return whether top-k, min-p or top-p exclude any token."""
    return p.min_p > 0.0 or 0 < p.top_k < vocab or p.top_p < 1.0
