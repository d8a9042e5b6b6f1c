"""What users give a simulated cluster in files: which devices serve each model, and which links
they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from ballast.core.errors import ConfigError
from ballast.core.fleet import FleetDecision, FleetView, Need, Room
from ballast.core.link import LinkRates
from ballast.core.units import format_bytes
from ballast.fleet.faults import unknown
from ballast.fleet.schema import Keys, Name, Positive
from ballast.policy.base import FleetPolicy
from ballast.sim.toml_file import Size, Whole, read_keys
from ballast.sim.topology import APART, Joints


class _Rates(Keys):
    """Bytes per second of a link, by direction, alone and while the other direction carries."""

    to_device: Positive
    to_host: Positive
    to_device_mixed: Positive | None = None
    """None: as alone."""
    to_host_mixed: Positive | None = None

    @property
    def rates(self) -> LinkRates:
        return LinkRates(
            self.to_device,
            self.to_host,
            self.to_device_mixed or self.to_device,
            self.to_host_mixed or self.to_host,
        )


class _Links(Keys):
    """A file of `--links`: how the devices of a cluster are joined, as in `Joints`."""

    per_host: Size = 1
    host: _Rates | None = None


class _Homes(Keys):
    """A file of `--placement`."""

    homes: dict[Name, list[Whole | Name]] = Field(min_length=1)
    """By model, its devices: their numbers, counted from 0, or their names."""


@dataclass(frozen=True, slots=True)
class GivenHomes(FleetPolicy):
    """Models are on the devices that a file names, and stay there."""

    file: str
    homes: Mapping[str, Sequence[int | str]]

    @property
    def replicates(self) -> bool:
        return any(len(devices) > 1 for devices in self.homes.values())

    def place(self, needs: Sequence[Need], rooms: Sequence[Room]) -> dict[str, list[str]]:
        """Return, by model, the names of its devices, each once.

        Raises ConfigError: a model that is not named or not known, a device that there is not, or
        one that cannot serve the model.
        """
        models, names = [need.model for need in needs], [room.device for room in rooms]
        for model in self.homes:
            if model not in models:
                raise ConfigError(f"{self.file}: homes", model, unknown(model, models))
        found = {}
        for need in needs:
            chosen = self.homes.get(need.model)
            if not chosen:
                allowed = "one device or more for each model of the fleet"
                raise ConfigError(f"{self.file}: homes", need.model, allowed)
            found[need.model] = list(dict.fromkeys(self._device(at, names) for at in chosen))
            for room in rooms:
                if room.device in found[need.model] and need.least > room.bytes:
                    missing = format_bytes(need.least - room.bytes)
                    allowed = f"{room.device} is too small for it: {missing} are missing"
                    raise ConfigError(f"{self.file}: homes", need.model, allowed)
        return found

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        return FleetDecision(memo=memo)

    def _device(self, at: int | str, names: Sequence[str]) -> str:
        if isinstance(at, int):
            if at >= len(names):
                allowed = f"devices are numbered from 0 to {len(names) - 1}"
                raise ConfigError(f"{self.file}: homes", at, allowed)
            return names[at]
        if at not in names:
            raise ConfigError(f"{self.file}: homes", at, unknown(at, names))
        return at


def given_homes(file: str) -> GivenHomes:
    """The homes in a TOML file. Raises ConfigError for one that cannot be read."""
    return GivenHomes(file, read_keys(Path(file), _Homes).homes)


def given_links(file: Path | None) -> Joints:
    """How devices are joined, by a TOML file; without one each is apart. Raises ConfigError."""
    if file is None:
        return APART
    read = read_keys(file, _Links)
    host = None if read.host is None else read.host.rates
    return Joints(per_host=read.per_host, host=host)
