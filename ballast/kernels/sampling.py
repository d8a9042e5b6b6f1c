"""The next token: a function of (logits, parameters, seed, choice, position) alone.

Greedy at temperature 0. Else Gumbel-max: the token with the largest `logit / temperature + g`,
where g is Gumbel noise from a counter-based generator (Philox 4x32-10; Salmon et al., SC'11) with
the seed as key and (token, position, choice) as counter. There is no state to carry along: a
request that was preempted, moved or resumed after a crash continues with the tokens it would have
had, whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit

from ballast.core.request import Sampling

Array = np.ndarray[Any, Any]


def sample(
    logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]
) -> tuple[list[int], list[float | None]]:
    """Choose one token for each row of `logits` (n, vocab), float32 and contiguous.

    `positions[i]` is the index that the new token will have in its whole sequence. Beside the
    tokens, log-probabilities where `params` ask for them: of the chosen token, by the raw logits.
    Top-k keeps what is not below the k-th largest logit; top-p the fewest most probable tokens
    (of those kept) that have at least that probability together. Equal logits: the smaller index
    first.
    """
    n = logits.shape[0]
    tokens = [0] * n
    greedy = [i for i, p in enumerate(params) if p.temperature <= 0.0]
    if greedy:
        rows = logits if len(greedy) == n else logits[greedy]
        for i, token in zip(greedy, rows.argmax(-1).tolist(), strict=True):
            tokens[i] = token
    if len(greedy) < n:
        array = logits.numpy()
        for i, p in enumerate(params):
            if p.temperature > 0.0:
                tokens[i] = _drawn(array[i], p, positions[i])
    asked = [i for i, p in enumerate(params) if p.logprobs is not None]
    logprobs: list[float | None] = [None] * n
    if asked:
        chosen = torch.tensor([tokens[i] for i in asked])[:, None]
        found = logits[asked].log_softmax(-1).gather(1, chosen)[:, 0]
        for i, value in zip(asked, found.tolist(), strict=True):
            logprobs[i] = value
    return tokens, logprobs


def _drawn(row: Array, p: Sampling, position: int) -> int:
    candidates = _candidates(row, p)
    seed = p.seed & 0xFFFFFFFFFFFFFFFF
    return int(
        _gumbel_max(
            row,
            candidates,
            np.float64(1.0 / p.temperature),
            np.uint64(seed & 0xFFFFFFFF),
            np.uint64(seed >> 32),
            np.uint64(position & 0xFFFFFFFF),
            np.uint64(p.choice & 0xFFFFFFFF),
        )
    )


def _candidates(row: Array, p: Sampling) -> Array:
    """Indices that top-k and top-p leave, int64; empty stands for all."""
    kept = np.empty(0, np.int64)
    if 0 < p.top_k < len(row):
        least = np.partition(row, -p.top_k)[-p.top_k]
        kept = np.flatnonzero(row >= least)
    if p.top_p >= 1.0:
        return kept
    logits = (row[kept] if len(kept) else row).astype(np.float64) / p.temperature
    weights = np.exp(logits - logits.max())
    # Tokens rarer than this have less than 1 - top_p together: they need not be sorted.
    likely = np.flatnonzero(weights >= (1.0 - p.top_p) * weights.sum() / len(weights))
    order = likely[np.argsort(-weights[likely], kind="stable")]
    reached = np.cumsum(weights[order]) >= p.top_p * weights.sum()
    # If rounding keeps the sum from ever reaching it, all that are likely stay.
    last = int(reached.argmax()) if reached.any() else len(order) - 1
    nucleus = order[: last + 1]
    return np.ascontiguousarray(kept[nucleus] if len(kept) else nucleus)


_MASK = np.uint64(0xFFFFFFFF)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_SHIFT = np.uint64(32)
_UNIT = 2.0**-52


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Philox 4x32-10: four random 32-bit numbers of a counter and a key, all in uint64."""
    for _ in range(10):
        a, b = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _MASK, (a >> _SHIFT) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _gumbel_max(
    row: Any, candidates: Any, inverse: Any, k0: Any, k1: Any, position: Any, choice: Any
) -> Any:
    """Argmax of row * inverse + Gumbel noise over `candidates` (empty: over all)."""
    n = len(candidates)
    best, best_at = -np.inf, np.int64(-1)
    for i in range(n if n else len(row)):
        at = candidates[i] if n else np.int64(i)
        c0, c1, _, _ = philox(np.uint64(at), position, choice, np.uint64(0), k0, k1)
        # 52 bits and a half: strictly between 0 and 1 (the largest rounds to 1 - 2**-53).
        uniform = (
            float(c0 * np.uint64(1 << 20) + (c1 >> np.uint64(12))) + 0.5
        ) / 4503599627370496.0
        score = float(row[at]) * inverse - np.log(-np.log(uniform))
        if score > best or (score == best and at < best_at) or best_at < 0:
            best, best_at = score, at
    return best_at


def warm_up() -> None:
    """Compile, unless Numba's cache has it (a second)."""
    sample(torch.zeros(1, 2), [Sampling(temperature=1.0)], [0])
