"""Load a model into a host tier, measuring its jobs as a device of the fleet would.

Used by `ballast doctor` and `bench.run`, which need specs as served, without a running worker.
"""

from __future__ import annotations

from dataclasses import replace

from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.isolation.calls import Isolation
from ballast.kv.layout import fitted
from ballast.models.divergence import Divergence, kv_divergence
from ballast.models.on_cpu import on_cpu
from ballast.models.profile_run import measured
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostModel, HostTier


def load_as_served(
    model: ModelSettings, fleet: FleetSettings, isolation: Isolation | None = None
) -> HostModel:
    """Load a checkpoint into a new host tier, examined by `isolation`, or in this process; its jobs
    are measured where the fleet has a CPU of one rank.

    Raises as `load_host_model` and `measured`.
    """
    host = load_host_model(as_placed(model, fleet), HostTier(isolation=isolation))
    host.spec = fitted(host.spec, model.block_tokens, fleet.device.page_bytes)
    device = _most([device for device, _ in fleet.devices.values()])
    return host if device is None else measured(host, on_cpu, device)


def divergence_as_served(host: HostModel, fleet: FleetSettings) -> Divergence | None:
    """Compare a loaded model's KV with that of its dtype, as a CPU of one rank computes; None if it
    is the same, or the fleet has no such CPU."""
    device = _most([device for device, _ in fleet.devices.values()])
    return None if device is None else kv_divergence(host, on_cpu, device)


def as_placed(model: ModelSettings, fleet: FleetSettings) -> ModelSettings:
    """Return a model's settings as its devices load it: GPUs take matrices that are not packed."""
    on_cpu = any(device.gpu is None for device, _ in fleet.devices.values())
    return model if on_cpu else replace(model, linear="plain")


def _most(devices: list[DeviceSettings]) -> DeviceSettings | None:
    """Return settings of a CPU whose jobs are as large as the largest of any; None without a
    CPU."""
    cpus = [d for d in devices if d.gpu is None and d.tensor_parallel == 1]
    if not cpus:
        return None
    return replace(
        cpus[0],
        step_tokens=max(d.step_tokens for d in cpus),
        step_logits=max(d.step_logits for d in cpus),
    )
