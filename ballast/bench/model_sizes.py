"""Read sizes of a fleet's models for a simulation, from the catalogue or from checkpoint headers.

Used by `bench.simulation_setup`. Reads a checkpoint's weights only where it has adapters.
"""

from __future__ import annotations

from ballast.core.errors import ConfigError
from ballast.core.levels import level_fields
from ballast.core.model import BLOCK_TOKENS, ModelSpec, plain_kv
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.fleet.entry_directory import CATALOGUE
from ballast.kv.layout import fitted
from ballast.sim.model_catalogue import facts

CONTEXT = 32768
"""Most tokens of a request to a catalogue model, where the fleet file sets none."""


def sizes_of(fleet: FleetSettings) -> list[ModelSpec]:
    """Return the specs of a fleet's models, in its order, with blocks of all layers. Only a
    checkpoint with adapters is loaded, and freed again.

    Raises ConfigError, which lists the known names, and the errors of loading a checkpoint.
    """
    page = fleet.device.page_bytes
    return [fitted(plain_kv(_size_of(m)), m.block_tokens, page) for m in fleet.models]


def _size_of(settings: ModelSettings) -> ModelSpec:
    if settings.path.startswith(CATALOGUE):
        return _known(settings)
    from ballast.weights.checkpoint import load_host_model, read_spec

    if not settings.adapters:
        return read_spec(settings)
    host = load_host_model(settings)
    try:
        return host.spec
    finally:
        host.close()


def _known(settings: ModelSettings) -> ModelSpec:
    try:
        found = facts(settings.path.removeprefix(CATALOGUE))
    except ConfigError as error:
        raise ConfigError(f"{settings.name}: path", settings.path, error.allowed) from None
    if settings.adapters:
        names = [a.name for a in settings.adapters]
        allowed = f"adapters stand on a checkpoint, and {settings.name} is {settings.path}"
        raise ConfigError("adapters", names, allowed)
    if settings.dtype == "float32":
        allowed = f"{settings.path} is served in bfloat16: leave `dtype` out"
        raise ConfigError(f"{settings.name}: dtype", settings.dtype, allowed)
    return found.spec(
        name=settings.name,
        fingerprint=settings.name,
        max_model_len=settings.max_model_len or CONTEXT,
        block_tokens=settings.block_tokens or BLOCK_TOKENS,
        kv_dtype=settings.kv_dtype,
        expected_tokens=settings.expected_tokens,
        expected_longest=settings.expected_longest,
        max_answer=settings.max_answer,
        **level_fields(settings),
    )
