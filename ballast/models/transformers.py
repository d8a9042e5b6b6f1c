"""Run any decoder that `transformers` supports on CPU, with weights and KV cache in pool memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ballast.core.job import SequenceWork
from ballast.kernels.paged_attention import warm_up
from ballast.kv.layout import Layout
from ballast.memory.tensor import tensor_at
from ballast.models import attention
from ballast.models.adapters import AdaptedModules, groups_of, rows_of
from ballast.models.executor import ModelExecutor, Rows
from ballast.models.module import layers_of, placed
from ballast.weights.host import HostModel


class TransformersModel(ModelExecutor):
    """Runs the jobs of any decoder through its own module."""

    def __init__(
        self,
        host: HostModel,
        segment_addresses: Sequence[int],
        kv_base: int,
        layout: Layout,
        invariant: bool = False,
    ) -> None:
        """`segment_addresses[i]`: address of segment i of `host` while the model is resident;
        `invariant`: as of `FusedModel`, as far as its matrices are packed.

        Raises UnsupportedModel if the module keeps state that cannot be set up without its weights.
        """
        super().__init__(host, kv_base, layout)
        own = len(host.segments)
        self._module = placed(host, segment_addresses[:own], tensor_at, invariant=invariant)
        groups = groups_of(host.adapters, segment_addresses[own:], self.dtype)
        self._adapted = AdaptedModules(self._module, {p: g.add for p, g in groups.items()})
        self._stops: Collection[int] = ()
        """Layers at which the current pass calls `barriers`."""
        for i, layer in enumerate(layers_of(self._module, host)):
            layer.register_forward_pre_hook(partial(self._reach, i))
            layer.register_forward_hook(partial(self._leave, i))
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

    def _reach(self, layer: int, *_: Any) -> None:
        if layer in self._stops and self.barriers is not None:
            self.barriers.wait(layer)

    def _leave(self, layer: int, *_: Any) -> None:
        if layer in self._stops and self.barriers is not None:
            self.barriers.used(layer)

    def _forward(
        self, module: Any, rows: Rows, work: Sequence[SequenceWork], **more: Tensor
    ) -> Any:
        self._stops = self._begin_pass(work)
        with (
            attention.running(attention.JobContext.of(rows.paged)),
            self._adapted.job(rows_of(work), head=module is self._module),
        ):
            return module(
                input_ids=torch.from_numpy(rows.tokens)[None],
                position_ids=torch.from_numpy(rows.positions)[None],
                use_cache=False,
                **more,
            )
