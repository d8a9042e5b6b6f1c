"""Build the first entry of a device's story: the state on which its turns depend, beside events.

Used by the engine loop, live and simulated, before its first turn, if the story is kept whole; the
command handler describes a model that joins in the same way. Reads the state, changes nothing.
"""

from __future__ import annotations

from ballast import __version__
from ballast.core.entries import ModelEntry, Snapshot
from ballast.core.story import Story
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.policy.presets import Preset


def model_entry(m: ModelState) -> ModelEntry:
    """Return the story's entry for one model of the device."""
    return ModelEntry(spec=m.spec, costs=m.costs, learned=m.estimator is not None)


def snapshot(state: DeviceState, preset: Preset, story: Story) -> Snapshot:
    """Return the snapshot of a device that has not had a turn yet."""
    models = state.models.values()
    return Snapshot(
        version=__version__,
        device=state.settings,
        preset=preset.name,
        options=dict(preset.options),
        link_bytes_per_second=state.link_bytes_per_second,
        models=tuple(model_entry(m) for m in models),
        began=story.began,
        overhead=story.overhead,
        rotates=state.make_stream is not None,
        tiers=state.tiers.copies is not None,
        order=preset.order,
        near_host=not state.link.paced,
    )
