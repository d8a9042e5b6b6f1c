"""Keep what `ballast demo` measured of a fleet beside it, so that the next demo need not measure.

A measurement holds for the same models, device, code, libraries and CPU. It is only a cache: one
that cannot be read is made again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch

from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.fleet.atomic_file import replace
from ballast.kernels.choice_file import cpu_facts
from ballast.kernels.compiled import digest_of
from ballast.sim.machine_profile import MachineProfile
from ballast.weights.source_files import identity

log = logging.getLogger(__name__)

FILE = "measured.msgpack"
"""Beside the fleet file."""
_PARTS = [f.name for f in fields(MachineProfile) if f.compare]
"""Fields of a profile that are numbers."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A machine and a fleet's models, as they were measured."""

    profile: MachineProfile
    specs: Sequence[ModelSpec]
    when: str
    """Day and time."""


class _Kept(msgspec.Struct):
    key: str
    when: str
    profile: dict[str, Any]
    specs: list[ModelSpec]


def key_of(fleet: FleetSettings) -> str:
    """Return a hex digest of all that a measurement depends on."""
    code = digest_of(Path(__file__).parents[1].rglob("*.py"))
    machine = (torch.__version__, cpu_facts(), len(os.sched_getaffinity(0)))
    models = [(m.name, identity(m), m.dtype, m.max_model_len, m.linear) for m in fleet.models]
    facts = (code, machine, fleet.device, fleet.link, models)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def find(file: Path, key: str) -> Measurement | None:
    """Return what was kept under `key`; None: nothing was."""
    kinds = get_type_hints(MachineProfile)
    try:
        kept = msgspec.msgpack.decode(file.read_bytes(), type=_Kept)
        if kept.key != key:
            return None
        costs = {name: msgspec.convert(kept.profile[name], kinds[name]) for name in _PARTS}
    except (OSError, KeyError, msgspec.MsgspecError):
        return None
    return Measurement(MachineProfile(**costs), kept.specs, kept.when)


def keep(file: Path, key: str, profile: MachineProfile, specs: Sequence[ModelSpec]) -> None:
    """Keep a measurement in place of the one before."""
    costs = {name: getattr(profile, name) for name in _PARTS}
    kept = _Kept(key, f"{datetime.now():%Y-%m-%d %H:%M}", costs, list(specs))
    try:
        replace(file, msgspec.msgpack.encode(kept))
    except OSError as error:
        log.warning("what was measured is not kept: %s", error)
