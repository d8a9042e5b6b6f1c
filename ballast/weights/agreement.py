"""Check that a module computes the same logits in our batches as in `transformers`' own forward.

The reference is the module's own forward: one sequence at a time, `transformers`' attention and
masks, and no positions given, so that the module computes them itself. Ours is one flat batch of
pieces of several sequences, each with its positions, and an attention that is called as in serving.
Both run without the model's weights (`ballast.weights.weightless`) and through the fewest layers
that include every kind of layer. A difference, such as positions that the module counts by itself
or a scale that grows with them, would mean wrong answers: the model is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)
from transformers.integrations.moe import ExpertsInterface

from ballast.core.errors import brief
from ballast.weights.carried_state import StateKey, Stretch, carrying, state_modules
from ballast.weights.latent import absorbed, over_latents
from ballast.weights.row_call import RowCall
from ballast.weights.spelt_attention import set_attention

_NAME = "ballast_agreement"
_LEAST_LAYERS = 5
"""Least layers that are run: patterns of layers commonly repeat after four."""
_TOLERANCE = 5e-3
"""Largest difference, in standard deviations of the logits. Rounding causes less than a fifth of
it, wrong positions more."""
_MOST_STATES = 4
"""States of a kind that a module may carry."""
_ATTEMPTS = 3
"""Attempts, each with other tokens: rounding can change a choice of experts, but not every time."""


@dataclass(frozen=True, slots=True)
class Case:
    """A sequence of `length` tokens from position `start` on, the first `cut` of them in an earlier
    batch than the rest."""

    start: int
    length: int
    cut: int


_STEPPED = Case(0, 6, 5)
"""Its last token comes alone, for which modules that carry a state have another form."""


def cases(positions: int) -> list[Case]:
    """Return sequences at the beginning, in the middle and at the end of the context."""
    found = [Case(0, min(7, positions), min(4, positions - 1))]
    if positions >= 32:
        found += [Case(positions // 2, 5, 3), Case(positions - 4, 4, 1)]
    return found


@torch.inference_mode()
def disagreement(
    module: nn.Module, positions: int, vocab: int, *, latent: bool = False
) -> str | None:
    """Compare the module's logits in our batches with its own, within `positions`; returns the
    difference in words, or None. `latent`: ours attend over latents (`ballast.weights.latent`).

    `module` is weightless, and has only the layers that have to be run. Raises whatever the module
    raises if it cannot be run in our batches.
    """
    found, tried = None, cases(positions)
    if _cache_name(module) is None:  # nothing comes before what its own forward computes
        tried = tried[:1]
    if state_modules(module) and positions > _STEPPED.length:
        tried = [*tried, _STEPPED]
    for attempt in range(_ATTEMPTS):
        found = _compare(module, tried, vocab, attempt, latent)
        if found is None:
            break
    return found


def batched(module: Any, positions: int, vocab: int) -> list[Tensor]:
    """Return the (length, vocab) logits of each of `cases(positions)`, computed in batches of
    pieces of all of them.

    `module` is weightless and attends through `attend`: a module of `transformers`, or an object
    that is called in the same way.
    """
    tried = cases(positions)
    if isinstance(module, nn.Module):
        run: Any = module
        run.set_experts_implementation(_NAME)
        set_attention(run, _NAME)
    return _ours(module, tried, _tokens(tried, vocab, seed=0))


def _tokens(tried: Sequence[Case], vocab: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (case.length,), generator=generator) for case in tried]


def _compare(
    module: nn.Module, tried: Sequence[Case], vocab: int, seed: int, latent: bool
) -> str | None:
    tokens = _tokens(tried, vocab, seed)
    run: Any = module
    run.set_experts_implementation(_NAME)
    set_attention(run, _NAME)
    with absorbed(module) if latent else nullcontext():
        ours = _ours(run, tried, tokens)
    set_attention(run, "eager")
    for case, ids, logits in zip(tried, tokens, ours, strict=True):
        where = f"at positions {case.start} to {case.start + case.length - 1}"
        try:
            theirs = _theirs(run, case, ids)
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            return f"transformers' own forward fails {where}: {brief(error)}"
        off = float((logits - theirs).abs().max() / theirs.std())
        if not off <= _TOLERANCE:
            return (
                f"its logits {where} are others in a batch than transformers computes for one "
                f"sequence, by {off:.2g} standard deviations, as if it counted positions itself"
            )
    return None


# -- transformers' way ----------------------------------------------------------------------------


class _Forgotten(DynamicLayer):  # type: ignore[misc]
    """KV cache of a sequence that is `seen` tokens long, all of which have been dropped."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self._seen = seen

    def get_seq_length(self) -> int:
        return self._seen + int(super().get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(super().get_seq_length()) + query_length, self._seen


class _ForgottenState(LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """The same of a layer in a model with recurrent states, of which the sequence has none."""

    def __init__(self, seen: int) -> None:
        super().__init__(number_of_states=_MOST_STATES)
        self._seen = seen

    def get_seq_length(self) -> int:
        return self._seen + int(super().get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(super().get_seq_length()) + query_length, self._seen


def _theirs(module: Any, case: Case, ids: Tensor) -> Tensor:
    """Return the (length, vocab) logits of a case by `transformers`' own forward."""
    if case.start == 0:
        output = module(input_ids=ids[None], use_cache=False)
    else:
        made = _ForgottenState if state_modules(module) else _Forgotten
        layers = [made(case.start) for _ in range(_n_layers(module))]
        name = _cache_name(module)
        assert name is not None  # else only what begins a sequence is compared
        cache = {name: Cache(layers=layers)}
        output = module(input_ids=ids[None], use_cache=True, **cache)
    logits: Tensor = output.logits[0]
    return logits


def _cache_name(module: Any) -> str | None:
    """Return the name of the module's argument for its cache: `past_key_values`, and `cache` from
    transformers 5.24 on; None: it has none."""
    taken = signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), None)


def _n_layers(module: Any) -> int:
    return int(module.config.get_text_config().num_hidden_layers)


# -- our way --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Batch:
    """One batch; `pieces`: (sequence, tokens) in the order of its rows."""

    pieces: Sequence[tuple[int, int]]
    kv: dict[tuple[int, int], tuple[Tensor, Tensor]]
    """By sequence and layer: keys and values (kv_heads, tokens, head_dim) so far."""
    states: dict[tuple[int, StateKey], Tensor]
    """By sequence: its recurrent states."""
    begun: frozenset[int]
    """Sequences that were in an earlier batch."""

    @property
    def stretches(self) -> list[Stretch]:
        ends = np.cumsum([n for _, n in self.pieces]).tolist()
        return [
            Stretch(slice(end - n, end), 1, sequence not in self.begun)
            for (sequence, n), end in zip(self.pieces, ends, strict=True)
        ]

    def load(self, stretch: int, key: StateKey) -> Tensor:
        return self.states[self.pieces[stretch][0], key]

    def store(self, stretch: int, key: StateKey, state: Tensor) -> None:
        self.states[self.pieces[stretch][0], key] = state


_batch: ContextVar[_Batch] = ContextVar(_NAME)


@contextmanager
def _attending(batch: _Batch) -> Iterator[None]:
    token = _batch.set(batch)
    try:
        with carrying(batch):
            yield
    finally:
        _batch.reset(token)


def _ours(module: Any, tried: Sequence[Case], tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return the (length, vocab) logits of each sequence, computed in two batches of pieces of
    all."""
    kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    states: dict[tuple[int, StateKey], Tensor] = {}
    begun: frozenset[int] = frozenset()
    found: list[list[Tensor]] = [[] for _ in tried]
    call = RowCall(module)
    numbered = list(enumerate(tried))
    batches = (
        [(i, 0, case.cut) for i, case in numbered],
        [(i, case.cut, case.length) for i, case in reversed(numbered)],
    )
    for batch in batches:
        pieces = [(i, first, last) for i, first, last in batch if last > first]
        ids = torch.cat([tokens[i][first:last] for i, first, last in pieces])
        positions = torch.cat(
            [torch.arange(first, last) + tried[i].start for i, first, last in pieces]
        )
        rows = [(i, last - first) for i, first, last in pieces]
        with _attending(_Batch(rows, kv, states, begun)):
            output = call(module, ids, positions, torch.arange(len(ids)))
        at = 0
        for i, first, last in pieces:
            found[i].append(output.logits[0, at : at + last - first])
            at += last - first
        begun = frozenset(i for i, _, _ in pieces)
    return [torch.cat(parts) for parts in found]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend as `ballast.models.attention.attend`, in plain tensors, within a batch of this module.

    Query (1, heads, T, head_dim), key and value (1, kv_heads, T, their own).
    """
    batch, layer = _batch.get(), int(module.layer_idx)
    heads, kv_heads = query.shape[1], key.shape[1]
    out = query.new_empty(heads, query.shape[2], value.shape[3])
    at = 0
    for sequence, n in batch.pieces:
        rows = slice(at, at + n)
        at += n
        keys, values = key[0, :, rows], value[0, :, rows]
        if (sequence, layer) in batch.kv:
            before = batch.kv[sequence, layer]
            keys, values = torch.cat([before[0], keys], 1), torch.cat([before[1], values], 1)
        batch.kv[sequence, layer] = keys, values
        q = query[0, :, rows].reshape(kv_heads, heads // kv_heads, n, -1).float()
        scores = q @ keys.float()[:, None].transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        last = keys.shape[1]
        back = torch.arange(last - n, last)[:, None] - torch.arange(last)
        scores.masked_fill_(back < 0, -torch.inf)
        if sliding_window is not None:
            scores.masked_fill_(back >= sliding_window, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.float().view(kv_heads, -1, 1, 1).expand(-1, -1, n, 1)
            scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            scores = scores.softmax(-1)
        out[:, rows] = (scores @ values.float()[:, None]).reshape(heads, n, -1).to(out.dtype)
    return out.transpose(0, 1)[None].contiguous(), None


def _experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Stand in for experts: the result depends on the weights of the choice, not on which experts
    are chosen, as rounding may change that."""
    return hidden_states * (0.5 + 0.1 * top_k_weights.sum(-1, keepdim=True)).to(hidden_states.dtype)


AttentionInterface.register(_NAME, over_latents(attend))
ExpertsInterface.register(_NAME, _experts)


# -- few layers -----------------------------------------------------------------------------------


def layers_to_run(kinds: Sequence[Hashable]) -> int:
    """Return the number of layers, from the first, that include every one of `kinds` (the kind of
    each layer)."""
    firsts = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    return min(len(kinds), max(_LEAST_LAYERS, 1 + max(firsts.values())))
