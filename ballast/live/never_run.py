"""List GPU features that have never run on a real GPU, only against stand-ins in tests.

Used by `doctor` and by live devices, to report such features where a fleet turns them on.
A feature leaves this table once `scripts/gpu_check` or a test marked `gpu` has shown it to work.
"""

from __future__ import annotations

from ballast.core.settings import DeviceSettings, FleetSettings

WHERE = "docs/gpu.md, `Never run`"
GROUPS = "groups of GPUs (`tensor_parallel`)"
FEATURES = (GROUPS,)


def never_run(fleet: FleetSettings, device: DeviceSettings) -> tuple[str, ...]:
    """Return those of `FEATURES` that are turned on for `device`, of which `fleet` turns on none at
    present; none for a CPU."""
    if device.gpu is None:
        return ()
    on = {GROUPS: device.tensor_parallel > 1}
    return tuple(feature for feature in FEATURES if on[feature])
