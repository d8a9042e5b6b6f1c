"""Read a server's fleet: the fleet file merged with the changes that operators have made since.

Used at the start of the server and by the admin service.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.core.errors import ConfigError, NotKept
from ballast.core.settings import FleetSettings
from ballast.fleet.changes import Changes, changed, merged, rehomed
from ballast.fleet.changes_file import ChangesFile
from ballast.fleet.fleet_file import read_keys, resolved
from ballast.fleet.hub import fetch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetReading:
    """The fleet to serve, and the operators' changes that it includes."""

    fleet: FleetSettings
    changes: Changes
    """Changes included in the fleet."""
    notes: tuple[str, ...]
    """Changes that no longer apply, each with the reason."""
    names: frozenset[str]
    """Names of the models and adapters in the fleet file itself."""


class FleetSource:
    """Reads the fleet at the start and whenever asked, and keeps the changes.

    `changes`: the file that keeps them; None: they last as long as the process. `adjust`: what
    the command line says instead of the file.
    """

    def __init__(
        self,
        file: Path,
        *,
        presets: Collection[str],
        changes: Path | None = None,
        adjust: Callable[[FleetSettings], FleetSettings] = lambda fleet: fleet,
        environ: Mapping[str, str] | None = None,
        fetch_hub: Callable[[str, str], str] = fetch,
    ) -> None:
        self.file = file
        self._presets = presets
        self._kept = ChangesFile(changes)
        self._adjust = adjust
        self._environ = environ
        self._fetch_hub = fetch_hub

    @property
    def changes(self) -> Changes:
        """As last read or kept."""
        return self._kept.changes

    def read(self) -> FleetReading:
        """Read and merge both files; models that cannot be had carry their `fault`. Raises
        ConfigError, which names the file or the key, or all models if none of them can be had."""
        kept = self._kept.read()
        keys = read_keys(self.file, presets=self._presets, environ=self._environ)
        entries = merged(keys.models, kept)
        if not entries.entries:
            allowed = f"operators have removed all models; see {self._kept.path}"
            raise ConfigError("models", [m.name for m in keys.models], allowed)
        fleet = resolved(keys, entries.entries, self.file.parent, self._fetch_hub, partial=True)
        models, changes, notes = changed(fleet.models, entries.changes)
        models, changes, moved = rehomed(models, changes, fleet.devices)
        return FleetReading(
            self._adjust(replace(fleet, models=models)),
            changes,
            entries.notes + notes + moved,
            frozenset(m.name for m in keys.models),
        )

    def settle(self, reading: FleetReading) -> None:
        """Log the changes that no longer apply, and drop them."""
        for note in reading.notes:
            log.warning("an operator's change is dropped: %s", note)
        try:
            self._kept.write(reading.changes)
        except NotKept as error:
            log.error("%s", error)

    def keep(self, changes: Changes) -> None:
        """Store the operators' changes so far. Raises NotKept, and nothing has changed."""
        self._kept.write(changes)
