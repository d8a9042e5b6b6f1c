"""`transformers`' own module for a model, its parameters views of memory that comes and goes.

The module is built once, on the meta device; its parameters become views of device addresses that
stay the same as long as the model exists. Nothing there is touched until a job runs, and jobs run
only while the model is resident.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ballast.core.errors import BrokenPromise, UnsupportedModel
from ballast.models import attention, linears
from ballast.weights.architecture import build
from ballast.weights.host import HostModel
from ballast.weights.packing import DTYPES, PANELS
from ballast.weights.segment import Segment

View = Callable[[int, Sequence[int], torch.dtype], Tensor]
"""A tensor of a shape and dtype at an address: `memory.tensor.tensor_at`, or a GPU's."""


def placed(
    host: HostModel, addresses: Sequence[int], view: View, device: torch.device | None = None
) -> nn.Module:
    """The module of `host`, segment i at `addresses[i]`, that attends as `models.attention` does.

    It has as many layers as `host`, which may be fewer than the configuration's. On the CPU, or on
    `device`. Raises UnsupportedModel where it keeps state that cannot be set up without its
    weights.
    """
    module = build(host.config)
    _cut(module, layers_of(module, host))
    module.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    _place(module, host.segments, addresses, view)
    _set_up_buffers(module, host.config.model_type, device or torch.device("cpu"))
    return module


def layers_of(module: nn.Module, host: HostModel) -> list[nn.Module]:
    """The module that runs each layer: all that the layer's segment holds is within it."""
    layers = host.segments[1 : 1 + host.spec.n_layers]
    return [module.get_submodule(layer_path(segment)) for segment in layers]


def layer_path(segment: Segment) -> str:
    """Path of the module that all of a layer's tensors are within."""
    paths = [name.split(".") for packed in segment.tensors for name in packed.names]
    together = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in together)


def _cut(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Drop the layers that come after these, the first ones."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and [*part][: len(layers)] == [*layers]:
            del part[len(layers) :]


def _place(
    module: nn.Module, segments: Sequence[Segment], addresses: Sequence[int], view: View
) -> None:
    """Make every parameter (and persistent buffer) a view of its place; touches nothing."""
    left = set(module.state_dict())
    for segment, base in zip(segments, addresses, strict=True):
        for packed in segment.tensors:
            if packed.layout == PANELS:
                (name,) = packed.names
                linear = module.get_submodule(name.removesuffix(".weight"))
                linears.replace(linear, base + packed.offset, DTYPES[packed.dtype])
                left.discard(name)
                continue
            tensor = view(base + packed.offset, packed.shape, DTYPES[packed.dtype])
            # Tied names share one Parameter, as they did before.
            parameter = nn.Parameter(tensor, requires_grad=False)
            for name in packed.names:
                path, _, leaf = name.rpartition(".")
                owner = module.get_submodule(path)
                if leaf in owner._parameters:
                    owner._parameters[leaf] = parameter
                else:
                    owner._buffers[leaf] = tensor
                left.discard(name)
    if left:
        raise BrokenPromise(f"no segment holds {sorted(left)}")


def _set_up_buffers(module: nn.Module, kind: str, device: torch.device) -> None:
    """Give buffers that no checkpoint holds (rotary frequencies) their values, and put them there.

    They were made on the meta device. `transformers` knows how to set each up; parameters are
    marked so that it leaves those alone. A buffer that it leaves alone, or draws at random, differs
    when that is done twice.
    """
    waiting: dict[str, nn.Module] = {}
    for path, owner in module.named_modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                waiting[f"{path}.{leaf}"] = owner
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    initialise: Any = module._init_weights
    found: list[dict[str, Tensor]] = []
    for before in (0, 1):
        for path, owner in waiting.items():
            leaf = path.rpartition(".")[2]
            owner._buffers[leaf] = torch.full_like(_buffer(owner, leaf), before, device="cpu")
        for owner in dict.fromkeys(waiting.values()):
            with torch.no_grad():
                initialise(owner)
        found.append({p: _buffer(o, p.rpartition(".")[2]).clone() for p, o in waiting.items()})
    for path in waiting:
        if not torch.equal(found[0][path], found[1][path]):
            raise UnsupportedModel(f"{kind}: nothing says how to set up its buffer {path}")
    for path, owner in waiting.items():
        leaf = path.rpartition(".")[2]
        owner._buffers[leaf] = _buffer(owner, leaf).to(device)


def _buffer(owner: nn.Module, leaf: str) -> Tensor:
    buffer = owner._buffers[leaf]
    assert buffer is not None
    return buffer
