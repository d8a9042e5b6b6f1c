"""Choose a model's executor on CPU: the fast path if its weights are laid out for it, else
generic."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.settings import DeviceSettings
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.models.executor import ModelExecutor
from ballast.models.fused.model import FusedModel
from ballast.models.transformers import TransformersModel
from ballast.weights.host import HostModel


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
    if host.fused:
        return FusedModel(*where, workspace, device.step_tokens, device.step_logits)
    return TransformersModel(*where)
