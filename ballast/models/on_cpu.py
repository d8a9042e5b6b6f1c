"""Choose a model's executor on CPU: the fast path if its weights are laid out for it, else
generic."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ballast.core.settings import DeviceSettings
from ballast.kernels import choices
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.models.encoder import EncoderModel
from ballast.models.executor import ModelExecutor
from ballast.models.fused.model import FusedModel
from ballast.models.transformers import TransformersModel
from ballast.weights.host import HostModel
from ballast.weights.packing_experts import ROUTER
from ballast.weights.segment import PLAIN

log = logging.getLogger(__name__)


def on_cpu(
    host: HostModel,
    segment_addresses: Sequence[int],
    kv_base: int,
    layout: Layout,
    workspace: Workspace,
    device: DeviceSettings,
) -> ModelExecutor:
    """Return the fast path's executor if `host` is laid out for it, else that of `transformers`'
    own module.

    `segment_addresses[i]`: address of segment i while the model is resident; `kv_base`: address of
    block 0. `workspace`: the lane's, used by the fast path only.
    """
    where = (host, segment_addresses, kv_base, layout)
    invariant = choices.is_invariant(device.invariant)
    if host.fused:
        most = (device.step_tokens, device.step_logits)
        return FusedModel(*where, workspace, *most, invariant=invariant)
    if host.spec.pooling:
        return EncoderModel(*where)
    return TransformersModel(*where, invariant=invariant)


def report_dependence(host: HostModel, device: DeviceSettings) -> None:
    """Log why a model's texts can depend on what else is served, if they can."""
    name, dtype = host.spec.name, host.spec.dtype
    matrices = [t for s in host.segments for t in s.tensors if len(t.shape) > 1]
    if dtype == "float32" or all(t.form for t in matrices):
        return
    if not choices.is_invariant(device.invariant):
        cure = "`invariant: 1` of the device prevents it, and is slower on this CPU"
        log.info("%s: in %s a text can depend on what else is served; %s", name, dtype, cure)
    elif plain := _plain_matrices(host):
        why = f"{plain[0]} is multiplied in an order that depends on other rows"
        log.warning("%s: `invariant` is not kept: %s", name, why)


def _plain_matrices(host: HostModel) -> list[str]:
    """Return names of the matrices that are multiplied as they are stored: of layers and the head,
    but not the routers of the fast path, whose kernel adds in one order."""
    first, *rest = host.segments
    heads = [
        t for t in first.tensors if len(t.names) > 1
    ]  # tied to embeddings, which are looked up
    tensors = [*heads, *(t for s in rest for t in s.tensors if len(t.shape) > 1)]
    ours = ROUTER if host.fused else ""
    return [t.names[-1] for t in tensors if t.layout == PLAIN and t.names[0] != ours]
