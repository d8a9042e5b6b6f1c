"""Compute the buffers that checkpoints lack, such as rotary frequencies, by `transformers`' own
code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ballast.core.errors import UnsupportedModel, brief


def set_up_buffers(module: nn.Module, kind: str, device: torch.device) -> None:
    """Compute the values of meta-device buffers, and put these on `device`.

    `transformers` initialises the buffers of each module by a method of the model that contains it,
    called for that module, or for one around it; parameters are marked so that it leaves those
    alone. Raises UnsupportedModel if it fails, and if it leaves a buffer unset or draws it at
    random, which shows as a difference between two runs.
    """
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for path, owner, ways in _owners(module, "", ()):
        waiting = [leaf for leaf, b in owner._buffers.items() if b is not None and b.is_meta]
        if not waiting:
            continue
        unset: str | None = waiting[0]
        for way in ways:
            unset = _try(owner, waiting, way, kind)
            if unset is None:
                break
        else:
            name = f"{path}{unset}"
            raise UnsupportedModel(f"{kind}: nothing says how to set up its buffer {name}")
        for leaf in waiting:
            owner._buffers[leaf] = _buffer(owner, leaf).to(device)


def _try(
    owner: nn.Module, waiting: Sequence[str], way: Callable[[], object], kind: str
) -> str | None:
    """Set up buffers in one way; returns the first that it leaves unset, None: it sets all."""
    found: list[dict[str, Tensor]] = []
    for before in (0, 1):
        for leaf in waiting:
            owner._buffers[leaf] = torch.full_like(_buffer(owner, leaf), before, device="cpu")
        try:
            with torch.no_grad():
                way()
        except Exception as error:
            reason = f"transformers cannot set up its buffers: {brief(error)}"
            raise UnsupportedModel(f"{kind}: {reason}") from error
        found.append({leaf: _buffer(owner, leaf).clone() for leaf in waiting})
    return next((x for x in waiting if not torch.equal(found[0][x], found[1][x])), None)


def _owners(
    module: nn.Module, path: str, around: Sequence[tuple[Any, nn.Module]]
) -> Iterator[tuple[str, nn.Module, list[Callable[[], object]]]]:
    """Yield every module, the prefix of its tensors' names, and how it may be initialised: by the
    method of the nearest model around each, itself, then the modules `around` it."""
    nearest = around[0][0] if around else None
    own = [(getattr(module, "_init_weights", nearest), module), *around]
    yield path, module, [partial(method, part) for method, part in own if method is not None]
    for name, child in module.named_children():
        yield from _owners(child, f"{path}{name}.", own)


def _buffer(owner: nn.Module, leaf: str) -> Tensor:
    buffer = owner._buffers[leaf]
    assert buffer is not None
    return buffer
