"""Sample the next token as a function of logits, tokens so far, parameters, seed, choice, position.

Used by the executors on CPU and GPU. If the request's parameters require it, logits are modified
first, in vLLM's order: bias, penalties, bans, grammar. Then the choice is greedy at temperature 0,
else Gumbel-max: the token with the largest `logit / temperature + g`, where g is Gumbel noise from
a counter-based generator (Philox 4x32-10; Salmon et al., SC'11) with the seed as key and (token,
position, choice) as counter. There is no state: a request that was preempted, moved or resumed
after a crash continues with the tokens it would have had, whatever else is in its batch.
Log-probabilities are always those of the raw logits.

A row without a finite maximum has no token: where the raw logits have none, the model is at fault;
where only the modified ones have none, the request is (`NoToken`). Other rows are not affected.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numba import njit

from ballast.core.request import Sampling
from ballast.kernels.compiled import is_kept

Array = np.ndarray[Any, Any]


Scores = tuple[float, tuple[tuple[int, float], ...]]
"""(log-probability of a token; the likeliest tokens with theirs, likeliest first)."""


class NoToken(enum.Enum):
    """Why a row of logits has no token."""

    NOT_FINITE = "not finite"
    """The raw logits have no finite maximum: NaN, +inf, or -inf for all tokens."""
    NONE_LEFT = "none left"
    """Biases, penalties, bans and grammar leave no token with a finite logit."""


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """Inputs of the next token beside its logits: tokens so far, and the grammar's mask."""

    history: Sequence[int]
    """Tokens of prompt and output so far."""
    prompt_tokens: int
    allowed: Array | None = None
    """(vocab,) bool: tokens that the output's grammar allows, at least one; None: no grammar."""


_NO_SHAPES: Mapping[int, SamplingContext] = MappingProxyType({})


def sample(
    logits: torch.Tensor,
    params: Sequence[Sampling],
    positions: Sequence[int],
    shapes: Mapping[int, SamplingContext] = _NO_SHAPES,
) -> tuple[list[int | NoToken], dict[int, Scores]]:
    """Choose one token for each row of `logits` (n, vocab), float32 and contiguous.

    `positions[i]`: index of the new token in its whole sequence; `shapes`: by row, for rows with
    `Sampling.shaped`. Returns the tokens, and by row the log-probabilities that `params` request;
    a row without a token has none.
    Min-p keeps tokens of at least that share of the likeliest's probability; of these, top-k keeps
    those not below the k-th largest logit; of these, top-p keeps the fewest most probable ones with
    at least that total probability. Equal logits: the smaller index first.
    """
    n = logits.shape[0]
    tokens: list[int | NoToken] = [NoToken.NOT_FINITE] * n
    likeliest = logits.argmax(-1)
    largest = logits.gather(1, likeliest[:, None])[:, 0].tolist()
    sound = [i for i in range(n) if math.isfinite(largest[i])]
    array = logits.numpy()
    for i in sound:
        shape, p = shapes.get(i), params[i]
        if shape is not None:
            tokens[i] = _shaped_token(array[i], p, shape, positions[i])
        elif p.temperature > 0.0:
            tokens[i] = _drawn(array[i], p, positions[i])
        else:
            tokens[i] = int(likeliest[i])
    scored = {
        i: (token, p.logprobs)
        for i, (token, p) in enumerate(zip(tokens, params, strict=True))
        if p.logprobs is not None and not isinstance(token, NoToken)
    }
    if not scored:
        return tokens, {}
    chosen, top = zip(*scored.values(), strict=True)
    return tokens, dict(zip(scored, scores(logits, list(scored), chosen, top), strict=True))


def _shaped_token(row: Array, p: Sampling, shape: SamplingContext, position: int) -> int | NoToken:
    """Choose the token of a row whose logits are modified first."""
    row = shaped(row, p, shape)
    likeliest = int(row.argmax())
    if not math.isfinite(row[likeliest]):
        return NoToken.NONE_LEFT
    return _drawn(row, p, position) if p.temperature > 0.0 else likeliest


def scores(
    logits: torch.Tensor, rows: Sequence[int], chosen: Sequence[int], top: Sequence[int]
) -> list[Scores]:
    """Score `chosen[i]` by row `rows[i]` of `logits`, and find the `top[i]` likeliest there.

    Of equally likely tokens the smaller comes first.
    """
    logprobs = logits[list(rows)].log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(chosen)[:, None])[:, 0].tolist()
    return [
        (value, _likeliest(logprobs[i], k) if k else ())
        for i, (value, k) in enumerate(zip(own, top, strict=True))
    ]


def _likeliest(row: torch.Tensor, k: int) -> tuple[tuple[int, float], ...]:
    k = min(k, len(row))
    # Of what is equal to the last of them, `topk` picks as it likes.
    candidates = (row >= row.topk(k).values[-1]).nonzero()[:, 0]
    order = row[candidates].argsort(descending=True, stable=True)[:k]
    tokens = candidates[order]
    return tuple(zip(tokens.tolist(), row[tokens].tolist(), strict=True))


def shaped(row: Array, p: Sampling, shape: SamplingContext) -> Array:
    """Return the logits (vocab,) after bias, penalties, bans and grammar; `row` is not changed."""
    row = row.copy()
    output = shape.history[shape.prompt_tokens :]
    if p.logit_bias:
        tokens, biases = zip(*p.logit_bias, strict=True)
        np.add.at(row, list(tokens), np.array(biases, np.float32))
    if p.repetition_penalty != 1.0:
        distinct = set(shape.history)
        seen = np.fromiter(distinct, np.int64, len(distinct))
        found, by = row[seen], np.float32(p.repetition_penalty)
        row[seen] = np.where(found > 0.0, found / by, found * by)
    if p.presence_penalty or p.frequency_penalty:
        counts = Counter(output)
        counted = np.fromiter(counts, np.int64, len(counts))
        times = np.fromiter(counts.values(), np.float32, len(counts))
        row[counted] -= np.float32(p.frequency_penalty) * times + np.float32(p.presence_penalty)
    allowed = shape.allowed
    if p.banned and len(output) < p.min_tokens:
        rest = np.ones(len(row), np.bool_) if allowed is None else allowed.copy()
        rest[list(p.banned)] = False
        # A grammar that leaves nothing else outweighs `min_tokens`.
        allowed = rest if rest.any() else allowed
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def _drawn(row: Array, p: Sampling, position: int) -> int:
    kept = limited(row, p)
    values = row[kept] if len(kept) else row
    if p.top_p < 1.0:
        chosen = nucleus(values, p)
        kept, values = kept[chosen] if len(kept) else chosen, values[chosen]
    return draw(values, kept, p, position)


def draw(values: Array, tokens: Array, p: Sampling, position: int) -> int:
    """Draw by Gumbel-max at the temperature of `p` over `tokens` (n,) int64 with logits `values`
    (n,) float32; empty `tokens`: over all tokens, values[i] being token i's."""
    seed = p.seed & 0xFFFFFFFFFFFFFFFF
    return int(
        _gumbel_max(
            np.ascontiguousarray(values),
            np.ascontiguousarray(tokens),
            np.float64(1.0 / p.temperature),
            np.uint64(seed & 0xFFFFFFFF),
            np.uint64(seed >> 32),
            np.uint64(position & 0xFFFFFFFF),
            np.uint64(p.choice & 0xFFFFFFFF),
        )
    )


def limited(row: Array, p: Sampling) -> Array:
    """Return the indices of `row` float32 kept by min-p and top-k, ascending int64; empty: all."""
    kept = np.empty(0, np.int64)
    if p.min_p > 0.0:
        least = row.max() + p.temperature * np.log(min(p.min_p, 1.0))
        kept = np.flatnonzero(row >= least)
    left = row[kept] if len(kept) else row
    if 0 < p.top_k < len(left):
        least = np.partition(left, -p.top_k)[-p.top_k]
        within = np.flatnonzero(left >= least)
        kept = kept[within] if len(kept) else within
    return kept


def weights_of(values: Array, p: Sampling) -> Array:
    """Return the probabilities of logits at the temperature of `p`, relative to the largest one,
    float64."""
    logits = values.astype(np.float64) / p.temperature
    weights: Array = np.exp(logits - logits.max())
    return weights


def nucleus(values: Array, p: Sampling) -> Array:
    """Return the indices of `values` float32 that top-p keeps, int64, the likeliest first.

    `values`: logits of a row that min-p and top-k have kept, in the order of tokens.
    """
    weights = weights_of(values, p)
    # Tokens rarer than this have less than 1 - top_p together: they need not be sorted.
    likely = np.flatnonzero(weights >= (1.0 - p.top_p) * weights.sum() / len(weights))
    order = likely[np.argsort(-weights[likely], kind="stable")]
    reached = np.cumsum(weights[order]) >= p.top_p * weights.sum()
    # If rounding keeps the sum from ever reaching it, all that are likely stay.
    last = int(reached.argmax()) if reached.any() else len(order) - 1
    return order[: last + 1]


_MASK = np.uint64(0xFFFFFFFF)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_SHIFT = np.uint64(32)


@njit(cache=is_kept(), nogil=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Compute Philox 4x32-10: four random 32-bit numbers of a counter and a key, all in uint64."""
    for _ in range(10):
        a, b = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _MASK, (a >> _SHIFT) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@njit(cache=is_kept(), nogil=True, error_model="numpy")  # type: ignore[untyped-decorator, unused-ignore]
def _gumbel_max(
    values: Any, tokens: Any, inverse: Any, k0: Any, k1: Any, position: Any, choice: Any
) -> Any:
    """Return the token with the largest values[i] * inverse + Gumbel noise; empty `tokens`: token i
    is i."""
    n = len(tokens)
    best, best_at = -np.inf, np.int64(-1)
    for i in range(len(values)):
        at = tokens[i] if n else np.int64(i)
        c0, c1, _, _ = philox(np.uint64(at), position, choice, np.uint64(0), k0, k1)
        # 52 bits and a half: strictly between 0 and 1 (the largest rounds to 1 - 2**-53).
        uniform = (
            float(c0 * np.uint64(1 << 20) + (c1 >> np.uint64(12))) + 0.5
        ) / 4503599627370496.0
        score = float(values[i]) * inverse - np.log(-np.log(uniform))
        if score > best or (score == best and at < best_at) or best_at < 0:
            best, best_at = score, at
    return best_at


def warm_up() -> None:
    """Compile, unless Numba's cache has it (a second)."""
    sample(torch.zeros(1, 2), [Sampling(temperature=1.0)], [0])
