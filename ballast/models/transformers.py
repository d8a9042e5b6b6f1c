"""Any decoder that `transformers` knows, its weights and KV cache in memory that comes and goes.

The module is built once, on the meta device; its parameters become views of device addresses that
stay the same as long as the model exists. Nothing there is touched until a job runs, and jobs run
only while the model is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ballast.core.errors import BrokenPromise, UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.kernels.paged_attention import warm_up
from ballast.kv.layout import Layout
from ballast.memory.tensor import tensor_at
from ballast.models import attention, linears
from ballast.models.adapters import AdaptedModules, groups_of
from ballast.models.served import Rows, Served
from ballast.weights.architecture import build
from ballast.weights.host import HostModel, Segment
from ballast.weights.packing import DTYPES, PANELS


class ServedModel(Served):
    """Runs the jobs of any decoder, through its own module."""

    def __init__(
        self,
        host: HostModel,
        segment_addresses: Sequence[int],
        kv_base: int,
        layout: Layout,
    ) -> None:
        """`segment_addresses[i]`: where segment i of `host` is while the model is resident.

        Raises UnsupportedModel where the module keeps state that cannot be set up without its
        weights.
        """
        super().__init__(host, kv_base, layout)
        self._module = build(host.config)
        self._module.set_attn_implementation(attention.NAME)  # type: ignore[operator]
        own = len(host.segments)
        _place(self._module, host.segments, segment_addresses[:own])
        _set_up_buffers(self._module, host.config.model_type)
        groups = groups_of(host.adapters, segment_addresses[own:], self.dtype)
        self._adapted = AdaptedModules(self._module, groups)
        warm_up(self.dtype)

    @torch.inference_mode()
    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        rows = self.rows(work)
        wanted = torch.from_numpy(rows.wanted)
        output = self._forward(self._module, rows, work, logits_to_keep=wanted)
        logits: Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def hidden(self, work: Sequence[SequenceWork]) -> Tensor:
        rows = self.rows(work)
        output = self._forward(self._module.base_model, rows, work)
        hidden: Tensor = output.last_hidden_state[0, torch.from_numpy(rows.wanted)]
        return hidden

    def _forward(
        self, module: Any, rows: Rows, work: Sequence[SequenceWork], **more: Tensor
    ) -> Any:
        with (
            attention.running(attention.JobContext.of(rows.paged)),
            self._adapted.job(work),
        ):
            return module(
                input_ids=torch.from_numpy(rows.tokens)[None],
                position_ids=torch.from_numpy(rows.positions)[None],
                use_cache=False,
                **more,
            )


def _place(module: nn.Module, segments: Sequence[Segment], addresses: Sequence[int]) -> None:
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
            view = tensor_at(base + packed.offset, packed.shape, DTYPES[packed.dtype])
            # Tied names share one Parameter, as they did before.
            parameter = nn.Parameter(view, requires_grad=False)
            for name in packed.names:
                path, _, leaf = name.rpartition(".")
                owner = module.get_submodule(path)
                if leaf in owner._parameters:
                    owner._parameters[leaf] = parameter
                else:
                    owner._buffers[leaf] = view
                left.discard(name)
    if left:
        raise BrokenPromise(f"no segment holds {sorted(left)}")


def _set_up_buffers(module: nn.Module, kind: str) -> None:
    """Give buffers that no checkpoint holds (rotary frequencies) their values, on the CPU.

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


def _buffer(owner: nn.Module, leaf: str) -> Tensor:
    buffer = owner._buffers[leaf]
    assert buffer is not None
    return buffer
