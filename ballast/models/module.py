"""Build `transformers`' own module for a model, with parameters that are views of pool memory.

The module is built once, on the meta device; its parameters become views of device addresses that
stay the same as long as the model exists. The memory there is not touched until a job runs, and
jobs run only while the model is resident.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from ballast.core.errors import BrokenPromise
from ballast.models import attention, linears, packed_experts
from ballast.weights.buffers import set_up_buffers
from ballast.weights.host import HostModel
from ballast.weights.packing import DTYPES, PANELS
from ballast.weights.packing_experts import EXPERT_PANELS
from ballast.weights.segment import PackedTensor, Segment

View = Callable[[int, Sequence[int], torch.dtype], Tensor]
"""Returns a tensor of a shape and dtype at an address: `memory.tensor.tensor_at`, or its
counterpart on GPUs."""


def placed(
    host: HostModel,
    addresses: Sequence[int],
    view: View,
    device: torch.device | None = None,
    *,
    invariant: bool = False,
) -> nn.Module:
    """Build the module of `host`, segment i at `addresses[i]`, with the attention of
    `models.attention`.

    It has as many layers as `host`, which may be fewer than the configuration's. It is on the CPU,
    or on `device`; `invariant`: as of `linears.packed`. Raises UnsupportedModel if it keeps state
    that cannot be set up without its weights.
    """
    from ballast.weights.meta_module import build_module  # its imports take seconds
    from ballast.weights.spelt_attention import set_attention

    attention.register()
    module = build_module(host.config, DTYPES[host.spec.dtype], host.spec.pooling)
    _cut(module, layers_of(module, host))
    if not host.spec.pooling:
        set_attention(module, attention.NAME)
    _place(module, host.segments, addresses, view, invariant)
    set_up_buffers(module, host.config.model_type, device or torch.device("cpu"))
    return module


def move(module: nn.Module, segment: Segment, address: int, view: View) -> None:
    """Make the tensors of a segment of plain matrices views of another address; touches no memory
    there. Modules keep their parameters."""
    for packed in segment.tensors:
        path, _, leaf = packed.names[0].rpartition(".")
        owner = module.get_submodule(path)
        found = owner._parameters if leaf in owner._parameters else owner._buffers
        tensor = found[leaf]
        assert tensor is not None, "a segment holds it"
        # Tied names share one tensor.
        tensor.data = view(address + packed.offset, packed.shape, DTYPES[packed.dtype])


def layers_of(module: nn.Module, host: HostModel) -> list[nn.Module]:
    """Return the module that runs each layer: it contains all tensors of the layer's segment."""
    layers = host.segments[1 : 1 + host.spec.n_layers]
    return [module.get_submodule(layer_path(segment)) for segment in layers]


def layer_path(segment: Segment) -> str:
    """Return the path of the module that contains all of a layer's tensors."""
    paths = [name.split(".") for packed in segment.tensors for name in packed.names]
    together = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in together)


def _cut(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Drop the layers after these, which are the first ones."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and [*part][: len(layers)] == [*layers]:
            del part[len(layers) :]


def _place(
    module: nn.Module,
    segments: Sequence[Segment],
    addresses: Sequence[int],
    view: View,
    invariant: bool,
) -> None:
    """Make every parameter (and persistent buffer) a view of its place; touches no memory there."""
    left = set(module.state_dict())
    experts: dict[str, dict[str, tuple[PackedTensor, int]]] = {}
    for segment, base in zip(segments, addresses, strict=True):
        for packed in segment.tensors:
            if packed.layout == PANELS:
                (name,) = packed.names
                linear = module.get_submodule(name.removesuffix(".weight"))
                at, dtype = base + packed.offset, DTYPES[packed.dtype]
                linears.replace(linear, at, dtype, invariant, packed.form)
                left.discard(name)
                continue
            if packed.layout == EXPERT_PANELS:
                path, _, leaf = packed.names[0].rpartition(".")
                experts.setdefault(path, {})[leaf] = packed, base + packed.offset
                left.discard(packed.names[0])
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
    for path, matrices in experts.items():
        packed_experts.replace(module.get_submodule(path), matrices)
    if left:
        raise BrokenPromise(f"no segment holds {sorted(left)}")
