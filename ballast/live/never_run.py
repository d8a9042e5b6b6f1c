"""List GPU features that have never run on a real GPU, only against stand-ins in tests.

Used by `doctor` and by live devices, to report such features where a fleet turns them on.
A feature leaves this table once `scripts/gpu_check` or a test marked `gpu` has shown it to work.
"""

from __future__ import annotations

from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.policy.presets import preset_of

WHERE = "docs/gpu.md, `Never run`"
STAGED = "KV blocks staged on the host (presets `kvswap`, `swiftcache`)"
IN_PLACE = "weights that kernels read in host memory (preset `c2cserve`)"
FEATURES = (STAGED, IN_PLACE)


def never_run(fleet: FleetSettings, device: DeviceSettings) -> tuple[str, ...]:
    """Return those of `FEATURES` that are turned on for `device` or by `fleet`; none for a CPU."""
    if device.gpu is None:
        return ()
    preset = preset_of(fleet)
    in_place = preset.requires.in_place or bool(preset.values.get("in_place"))
    on = {STAGED: preset.requires.kv_staging, IN_PLACE: in_place}
    return tuple(feature for feature in FEATURES if on[feature])
