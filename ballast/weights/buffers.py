"""Compute the buffers that checkpoints lack, such as rotary frequencies, by `transformers`' own
code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ballast.core.errors import UnsupportedModel, brief


def set_up_buffers(module: nn.Module, kind: str, device: torch.device) -> None:
    """Compute the values of meta-device buffers, and put these on `device`.

    `transformers` initialises the buffers of each module by a method of the model that contains it;
    parameters are marked so that it leaves those alone. Raises UnsupportedModel if it fails, and if
    it leaves a buffer unset or draws it at random, which shows as a difference between two runs.
    """
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for path, owner, initialise in _owners(module, "", None):
        waiting = [leaf for leaf, b in owner._buffers.items() if b is not None and b.is_meta]
        if not waiting:
            continue
        found: list[dict[str, Tensor]] = []
        for before in (0, 1):
            for leaf in waiting:
                owner._buffers[leaf] = torch.full_like(_buffer(owner, leaf), before, device="cpu")
            try:
                with torch.no_grad():
                    initialise(owner)
            except Exception as error:
                reason = f"transformers cannot set up its buffers: {brief(error)}"
                raise UnsupportedModel(f"{kind}: {reason}") from error
            found.append({leaf: _buffer(owner, leaf).clone() for leaf in waiting})
        for leaf in waiting:
            if not torch.equal(found[0][leaf], found[1][leaf]):
                name = f"{path}{leaf}"
                raise UnsupportedModel(f"{kind}: nothing says how to set up its buffer {name}")
            owner._buffers[leaf] = _buffer(owner, leaf).to(device)


def _owners(
    module: nn.Module, path: str, initialise: Any
) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], object]]]:
    """Yield every module, the prefix of its tensors' names, and its initialiser: the method of the
    nearest model around it."""
    initialise = getattr(module, "_init_weights", initialise)
    yield path, module, initialise
    for name, child in module.named_children():
        yield from _owners(child, f"{path}{name}.", initialise)


def _buffer(owner: nn.Module, leaf: str) -> Tensor:
    buffer = owner._buffers[leaf]
    assert buffer is not None
    return buffer
