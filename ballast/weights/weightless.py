"""Make modules without weights, which compute on the CPU at any size, in hardly any memory.

Used for the checks at load: what a module requires of its attention, and which positions it uses,
does not depend on the elements of its matrices. So linear layers and experts, nearly all of a
model, are replaced by functions that cost no more than a copy of their output; every other
parameter is random, a large one a view of a small buffer whose rows overlap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ballast.weights.buffers import set_up_buffers

_NOISE = 1 << 21
"""Number of random values that all parameters are made of."""
_LARGE = 1 << 20
"""Elements from which on a parameter's rows overlap."""
_SCALE = 0.05
_STEP = 3
"""Elements between neighbours along a dimension of a large parameter, except the last: rows differ,
and all of them fit into the buffer if they are fewer than 700,000."""


def replace_linears(module: nn.Module) -> None:
    """Make linear layers compute a cheap function of their inputs, without their weights.

    On the CPU or the meta device.
    """
    for number, owner in enumerate(module.modules()):
        if _is_replaced(owner):
            n_in, n_out = _sizes(owner)
            owner.forward = _linear(owner, n_in, n_out, number)


def make_weightless(module: nn.Module, kind: str) -> None:
    """Make a module of the meta device, whose linear layers are replaced, compute on the CPU.

    In float32; tied parameters stay tied. Raises UnsupportedModel as `set_up_buffers` does.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    """By identity of a replaced tensor: the tensor itself, so that its identity stays unique, and
    its replacement."""
    stored = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    for number, owner in enumerate(module.modules()):
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = parameter, _parameter(owner, leaf, parameter, len(made))
                owner._parameters[leaf] = made[id(parameter)][1]  # type: ignore[assignment]
        for leaf, buffer in owner._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) in stored:
                owner._buffers[leaf] = _elements(buffer, number)
            elif buffer.is_floating_point():
                owner._buffers[leaf] = buffer.float()
    set_up_buffers(module, kind, torch.device("cpu"))


def is_light(module: nn.Module) -> bool:
    """Whether no large matrix is left as a parameter, so that the module is quick to run."""
    return all(
        parameter.numel() <= _LARGE
        for owner in module.modules()
        if not (_is_replaced(owner) or isinstance(owner, nn.Embedding) or _has_experts(owner))
        for parameter in owner.parameters(recurse=False)
    )


def _is_replaced(owner: nn.Module) -> bool:
    return is_plain_linear(owner) or type(owner) is Conv1D


def _has_experts(owner: nn.Module) -> bool:
    """Whether a module's experts are computed by `transformers`' interface, for which there are
    stand-ins."""
    return hasattr(owner, "_is_expert_parallel")


def expert_matrices(owner: Any) -> tuple[str, ...]:
    """Return the names of the matrices of a module of experts that `transformers`' interface
    computes; empty: it is none, or has them in another way."""
    if not _has_experts(owner):
        return ()
    names = ("gate_up_proj" if owner.has_gate else "up_proj", "down_proj")
    found = [owner._parameters.get(name) for name in names]
    return names if all(p is not None and p.dim() == 3 for p in found) else ()


def is_plain_linear(owner: nn.Module) -> bool:
    """Whether a module computes x W^T + b, and nothing else."""
    return isinstance(owner, nn.Linear) and type(owner).forward is nn.Linear.forward


def _sizes(owner: Any) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear module."""
    if is_plain_linear(owner):
        return owner.in_features, owner.out_features
    inputs, outputs = owner.weight.shape
    return inputs, outputs


def _linear(owner: nn.Module, n_in: int, n_out: int, number: int) -> Callable[[Tensor], Tensor]:
    """Return x (..., n_in) -> (..., n_out): a stretch of x, repeated if need be, each element
    scaled."""
    scale = _contiguous(n_out, number) * (1 / _SCALE)
    first = (n_in - n_out) * (number % 4) // 3 if n_out < n_in else 0

    def forward(x: Tensor) -> Tensor:
        if n_out > n_in:
            x = torch.cat([x] * math.ceil(n_out / n_in), -1)
        y = x.narrow(-1, first, n_out) * scale.to(x.device)
        return y if owner.bias is None else y + owner.bias  # type: ignore[operator]

    return forward


def _parameter(owner: nn.Module, leaf: str, parameter: Tensor, number: int) -> Tensor:
    if leaf == "weight" and _is_replaced(owner):
        # Code that reads the weight itself gets its shape, and zeros.
        return torch.zeros(()).expand(parameter.shape)
    elements = _elements(parameter, number)
    # Weights of norms are around one; other one-dimensional parameters are added.
    return elements + 1 if leaf == "weight" and parameter.dim() == 1 else elements


def _elements(like: Tensor, number: int) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    shape = like.shape
    if like.numel() <= _LARGE:
        return _contiguous(like.numel(), number).view(shape)
    strides = [min(_STEP, _NOISE // (2 * n)) for n in shape]
    strides[-1] = min(1, _NOISE // (4 * shape[-1]))
    while sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= _NOISE:
        strides[strides.index(max(strides))] -= 1
    return _noise().as_strided(shape, strides)


def _contiguous(n: int, number: int) -> Tensor:
    """Return (n,) random values, different for each `number`."""
    noise = _noise()
    if n >= _NOISE:
        return noise.repeat(math.ceil(n / _NOISE))[:n]
    start = number * 104_729 % (_NOISE - n)
    return noise[start : start + n]


@functools.cache
def _noise() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_NOISE, generator=generator) * _SCALE
