"""Run modules that carry a state from token to token in batches of several sequences.

Gated delta nets, Mamba and short convolutions compute one sequence, or several of equal length,
from the states that `transformers`' cache holds. Here such a module is called for one *stretch* of
a flat batch after the other, with a cache of that stretch, so that its arithmetic is
`transformers`' own. Where states lie is up to the `StateBatch` in force: pool memory when serving
(`ballast.models.pooled_states`), tensors in the checks at load. Without one, modules run as usual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ballast.core.model import StateTensor

StateKey = tuple[str, str, int]
"""(module path, `conv` or `recurrent`, number) of a `StateTensor`."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Equally many tokens of each of `sequences`, which a module computes in one call."""

    rows: slice | Tensor
    """Rows of the batch, sequence by sequence."""
    sequences: int
    fresh: bool
    """Whether they begin their sequences: there is no state yet."""


class StateBatch(Protocol):
    """The states of one batch's sequences."""

    @property
    def stretches(self) -> Sequence[Stretch]:
        """All rows of the batch; those of one sequence in order."""

    def load(self, stretch: int, key: StateKey) -> Tensor:
        """Return the states (sequences, ...) before a stretch that is not fresh; the caller may
        write to them."""

    def store(self, stretch: int, key: StateKey, state: Tensor) -> None:
        """Keep the states (sequences, ...) after a stretch."""


_MASKS = ("attention_mask", "conv_mask")
"""Arguments for padding, of which a batch has none."""
_STEP = "mamba2_selective_state_update"
"""Function by which `transformers` computes single tokens of Mamba2."""
_UNBOUNDED = (0.0, float("inf"))
_batch: ContextVar[StateBatch | None] = ContextVar("ballast_states", default=None)


@contextmanager
def carrying(batch: StateBatch) -> Iterator[None]:
    """Have modules called within compute the stretches of `batch`."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


@dataclass(slots=True)
class StateShapes:
    """A batch of one fresh sequence that keeps the shapes of its states, not the states."""

    found: dict[StateKey, tuple[int, ...]] = field(default_factory=dict)
    stretches: Sequence[Stretch] = (Stretch(slice(None), 1, True),)

    def load(self, stretch: int, key: StateKey) -> Tensor:
        raise AssertionError("a fresh sequence has no state")

    def store(self, stretch: int, key: StateKey, state: Tensor) -> None:
        self.found[key] = tuple(state.shape[1:])

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return tuple(StateTensor(*key, shape) for key, shape in self.found.items())


def state_modules(module: nn.Module) -> list[str]:
    """Return the paths of modules that have a convolution and are called with a cache."""
    return [
        path
        for path, part in module.named_modules()
        if any(isinstance(child, nn.Conv1d) for child in part.children())
        and "cache" in inspect.signature(type(part).forward).parameters
    ]


def carry(module: nn.Module, paths: Iterable[str]) -> None:
    """Make these modules of `module` compute the batch in force, if there is one."""
    for path in paths:
        part = module.get_submodule(path)
        part.forward = _by_stretches(path, _bounded(part))


def _bounded(part: Any) -> Callable[..., Any]:
    """Return the forward of a module, whose time steps have their bounds in single tokens as well;
    in `transformers` only in prompts, so that chunks would decide what is computed."""
    limit, forward = getattr(part, "time_step_limit", _UNBOUNDED), inspect.unwrap(part.forward)
    function = inspect.unwrap(getattr(forward, "__func__", forward))
    update = getattr(function, "__globals__", {}).get(_STEP)
    if tuple(limit) == _UNBOUNDED or update is None:
        return part.forward  # type: ignore[no-any-return]

    def step(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        *args: Any,
        dt_bias: Tensor,
        dt_softplus: bool,
        **more: Any,
    ) -> Any:
        dt = nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*limit)
        return update(state, x, dt, *args, **more)

    names = {**function.__globals__, _STEP: step}
    bounded = FunctionType(
        function.__code__, names, None, function.__defaults__, function.__closure__
    )
    return MethodType(bounded, part)


def _by_stretches(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(forward).parameters)[1:]

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = _batch.get()
        if batch is None:
            return forward(hidden_states, *args, **kwargs)
        kwargs.update(zip(names, args, strict=False))
        kwargs = {name: value for name, value in kwargs.items() if name not in _MASKS}
        outputs: list[Tensor] = []
        several = False
        for i, stretch in enumerate(batch.stretches):
            cache = _StretchCache(batch, i, path)
            rows = hidden_states[0, stretch.rows]
            x = rows.view(stretch.sequences, -1, rows.shape[-1])
            found = forward(x, **{**kwargs, "cache": cache})
            cache.keep()
            several = isinstance(found, tuple)
            parts = [part.flatten(0, 1) for part in (found if several else (found,))]
            if not outputs:
                outputs = [
                    part.new_empty(hidden_states.shape[1], *part.shape[1:]) for part in parts
                ]
            for output, part in zip(outputs, parts, strict=True):
                output[stretch.rows] = part
        return tuple(output[None] for output in outputs) if several else outputs[0][None]

    return run


class _StretchCache:
    """What a module needs of `transformers.Cache`, for one stretch."""

    def __init__(self, batch: StateBatch, stretch: int, path: str) -> None:
        self._batch, self._stretch, self._path = batch, stretch, path
        self._states: dict[tuple[str, int], Tensor] = {}

    def keep(self) -> None:
        """Store all states, also those that the module has changed in place."""
        for (kind, index), state in self._states.items():
            self._batch.store(self._stretch, (self._path, kind, index), state)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state("recurrent", state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **unused: Any,
    ) -> Tensor:
        """Append inputs (n, channels, tokens), and keep the last; returns all of them."""
        before = self._state("conv", state_idx)
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            missing = max(0, size - conv_states.shape[-1])
            inputs = nn.functional.pad(conv_states, (missing, 0))
        else:
            size = before.shape[-1]
            inputs = torch.cat([before, conv_states], -1)
        self._states["conv", state_idx] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        self._states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _state(self, kind: str, index: int) -> Tensor | None:
        if self._batch.stretches[self._stretch].fresh:
            return None
        if (kind, index) not in self._states:
            key = self._path, kind, index
            self._states[kind, index] = self._batch.load(self._stretch, key)
        return self._states[kind, index]
