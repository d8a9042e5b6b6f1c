"""Run any decoder that `transformers` supports on CPU, with weights and KV cache in pool memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ballast.core.errors import UnsupportedModel
from ballast.core.job import SequenceWork
from ballast.core.model import ModelSpec
from ballast.kernels.paged_attention import PagedBatch, warm_up
from ballast.kv.layout import Layout
from ballast.memory.tensor import tensor_at
from ballast.models import attention
from ballast.models.adapters import AdaptedModules, groups_of, rows_of
from ballast.models.executor import ModelExecutor, Rows
from ballast.models.layer_arrays import LayerArray
from ballast.models.module import layers_of, placed
from ballast.models.pooled_states import PooledStates
from ballast.models.routed_experts import RoutedExperts
from ballast.weights.carried_state import carry
from ballast.weights.host import HostModel
from ballast.weights.latent import UP, absorb
from ballast.weights.row_call import RowCall


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
        self.states: PooledStates | None = None
        """Where recurrent states lie; None: the model has none."""
        if self.spec.states:
            self.states = PooledStates(self.spec, kv_base, layout)
            carry(self._module, {s.module: None for s in self.spec.states})
        groups = groups_of(host.adapters, segment_addresses[own:], self.dtype)
        _check_adapted(groups, self.spec)
        self._adapted = AdaptedModules(self._module, {p: g.add for p, g in groups.items()})
        if any(kv.latent for kv in self.spec.layer_kv):
            absorb(self._module)
        self._call = RowCall(self._module)
        self._stops: Collection[int] = ()
        """Layers at which the current pass calls `barriers`."""
        layers = layers_of(self._module, host)
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._reach, i))
            layer.register_forward_hook(partial(self._leave, i))
        self._experts = RoutedExperts(layers, host.segments[1:], lambda i: i in self._stops)
        warm_up(self._kv.dtype)

    @torch.inference_mode()
    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        rows = self.rows(work)
        wanted = torch.from_numpy(rows.wanted)
        output = self._forward(self._module, rows, work, wanted)
        logits: Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def hidden(self, work: Sequence[SequenceWork]) -> Tensor:
        rows = self.rows(work)
        output = self._forward(self._module.base_model, rows, work)
        hidden: Tensor = output.last_hidden_state[0, torch.from_numpy(rows.wanted)]
        return hidden

    def expert_bytes(self, layer: int) -> int:
        return self._experts.bytes_of(layer)

    def chosen_bytes(self, layer: int) -> int:
        return self._experts.chosen_bytes(layer)

    def _reach(self, layer: int, *_: Any) -> None:
        if layer in self._stops and self.barriers is not None:
            self.barriers.wait(layer)

    def _leave(self, layer: int, *_: Any) -> None:
        if layer in self._stops and self.barriers is not None:
            self.barriers.used(layer)

    def _forward(
        self,
        module: Any,
        rows: Rows,
        work: Sequence[SequenceWork],
        wanted: Tensor | None = None,
    ) -> Any:
        self._stops = self._begin_pass(work)
        with (
            nullcontext() if self.states is None else self.states.job(work),
            attention.running(_context(self._arrays, self.spec.n_heads, rows, work)),
            self._adapted.job(rows_of(work), head=module is self._module),
        ):
            tokens, positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
            return self._call(module, tokens, positions, wanted)


def _context(
    arrays: Sequence[LayerArray], heads: int, rows: Rows, work: Sequence[SequenceWork]
) -> attention.JobContext:
    """Return the context of a job over `arrays`, the first of which is that of `rows`."""
    starts, counts = [w.start for w in work], [len(w.tokens) for w in work]
    tables, others = [w.blocks for w in work], dict[int, attention.JobContext]()
    for array in arrays[1:]:
        batch = PagedBatch(array.kv, heads, starts, counts, tables)
        others.update(dict.fromkeys(array.numbers, attention.JobContext.of(batch, array, {})))
    return attention.JobContext.of(rows.paged, arrays[0], others)


def _check_adapted(paths: Iterable[str], spec: ModelSpec) -> None:
    """Raise UnsupportedModel if an adapter changes a module that carries a recurrent state, whose
    rows are not those of the job, or one that makes keys and values of latents, which is not
    called."""
    within = tuple(f"{s.module}." for s in spec.states)
    latent = any(kv.latent for kv in spec.layer_kv)
    for path in paths:
        if latent and path.endswith(f".{UP}"):
            what = "an adapter changes it, and attention is over latents"
            raise UnsupportedModel(f"{spec.name}: {path}: {what}; adapt other modules alone")
        if path.startswith(within):
            what = "an adapter changes it, and it carries a recurrent state"
            raise UnsupportedModel(f"{spec.name}: {path}: {what}; adapt attention and MLPs alone")
