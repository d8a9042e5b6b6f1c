"""List GPU features that have never run on a real GPU, only against stand-ins in tests.

Used by `doctor` and by live devices, to report such features where a fleet turns them on.
A feature leaves this table once `scripts/gpu_check` or a test marked `gpu` has shown it to work.
"""

from __future__ import annotations

from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.policy.presets import preset_of

WHERE = "docs/gpu.md, `Never run`"
GROUPS = "groups of GPUs (`tensor_parallel`)"
GREEN = "lanes on green contexts (`lanes`)"
ADAPTERS = "adapters on GPUs (`adapters` of a model)"
SWAPPING = "KV swapped by layers on GPUs (preset `kvswap`)"
FEATURES = (GROUPS, GREEN, ADAPTERS, SWAPPING)


def never_run(fleet: FleetSettings, device: DeviceSettings) -> tuple[str, ...]:
    """Return those of `FEATURES` that `fleet` turns on for `device`; none for a CPU."""
    if device.gpu is None:
        return ()
    on = {
        GROUPS: device.tensor_parallel > 1,
        GREEN: device.lanes > 1,
        ADAPTERS: any(model.adapters for model in fleet.models),
        SWAPPING: preset_of(fleet).requires.kv_swapping,
    }
    return tuple(feature for feature in FEATURES if on[feature])
