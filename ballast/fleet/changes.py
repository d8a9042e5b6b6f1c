"""Store operators' changes to a fleet as differences against its file, and merge both.

The later edit counts. A change stands while the fleet file has the value that it had when the
change was made: a name that was added and has since appeared in the file is the file's, a value
that was edited there is the file's, and changes of names that have gone from the file are dropped.
Used by `fleet.fleet_source` and the admin service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.fleet.field_types import DeviceName, Name
from ballast.fleet.fleet_file import numbered
from ballast.fleet.levels import Levels, T, keys_of, levels_of, said, with_levels
from ballast.fleet.schema import Keys, LiveKeys, NamedModelKeys


class Edit(Keys):
    """Levels of one model."""

    was: LiveKeys
    """Values before the first change of each key."""
    now: LiveKeys


Devices = Annotated[tuple[DeviceName, ...], Field(strict=False)]


class Homes(Keys):
    """Devices of one model."""

    was: Devices
    """Devices in the fleet file; empty where the file leaves the choice to the server."""
    now: Devices


class Changes(Keys):
    """All of them together; none by default."""

    version: Literal[1] = 1
    removed: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Names of the fleet file's models and adapters that were removed."""
    added: Annotated[tuple[NamedModelKeys, ...], Field(strict=False)] = ()
    """Whole entries, as the file would have them; its `defaults` do not count."""
    changed: dict[Name, Edit] = Field(default_factory=dict)
    """Models and adapters of the file, or added ones."""
    homes: dict[Name, Homes] = Field(default_factory=dict)
    """Models that operators have placed on devices, or withdrawn from some."""

    def adding(self, entry: NamedModelKeys, instead: Iterable[str]) -> Changes:
        """A model more; `instead`: names of the file that it stands in for, and its adapters."""
        left = self.removing((entry.name,), ())
        removed = dict.fromkeys((*left.removed, *instead))
        return _made(tuple(removed), (*left.added, entry), left.changed, left.homes)

    def removing(self, names: Collection[str], file: Collection[str]) -> Changes:
        """Without a model and its adapters, all in `names`; `file`: the names that the file has."""
        removed = dict.fromkeys((*self.removed, *(n for n in names if n in file)))
        return _made(
            tuple(removed),
            tuple(e for e in self.added if e.name not in names),
            {n: e for n, e in self.changed.items() if n not in names},
            {n: h for n, h in self.homes.items() if n not in names},
        )

    def changing(self, model: ModelSettings | AdapterSettings, values: Levels) -> Changes:
        """Other levels for a model or an adapter, which has those of `model` so far."""
        edit = self.changed.get(model.name)
        before = levels_of(model)
        was = {key: before[key] for key in values} | ({} if edit is None else said(edit.was))
        now = ({} if edit is None else said(edit.now)) | dict(values)
        return self._with_edit(model.name, was, now)

    def homing(self, model: ModelSettings, devices: Iterable[str]) -> Changes:
        """A model, so far as in `model`, is on these devices by an operator's word."""
        known = self.homes.get(model.name)
        return self._with_homes(
            model.name, model.devices if known is None else known.was, tuple(devices)
        )

    def homed_as(self, name: str, before: Changes) -> Changes:
        """Return changes with the devices of model `name` restored from `before`."""
        known = before.homes.get(name)
        return self._with_homes(name, *((), ()) if known is None else (known.was, known.now))

    def restoring(self, names: Collection[str], before: Changes) -> Changes:
        """Return changes with all that concerns `names` restored from `before`."""
        others = self.removing(names, ())
        return _made(
            tuple(n for n in others.removed if n not in names)
            + tuple(n for n in before.removed if n in names),
            others.added + tuple(e for e in before.added if e.name in names),
            others.changed | {n: e for n, e in before.changed.items() if n in names},
            others.homes | {n: h for n, h in before.homes.items() if n in names},
        )

    def _with_edit(self, name: str, was: Levels, now: Levels) -> Changes:
        """Return changes with one model's edit; keys that keep their value are left out."""
        real = [key for key in now if now[key] != was[key]]
        changed = {n: e for n, e in self.changed.items() if n != name}
        if real:
            changed[name] = Edit(
                was=keys_of({key: was[key] for key in real}),
                now=keys_of({key: now[key] for key in real}),
            )
        return _made(self.removed, self.added, changed, self.homes)

    def _with_homes(self, name: str, was: tuple[str, ...], now: tuple[str, ...]) -> Changes:
        """Return changes with one model's devices; left out where they are those of the file."""
        homes = {n: h for n, h in self.homes.items() if n != name}
        if set(now) != set(was):
            homes[name] = Homes(was=was, now=now)
        return _made(self.removed, self.added, self.changed, homes)


def _made(
    removed: tuple[str, ...],
    added: tuple[NamedModelKeys, ...],
    changed: dict[str, Edit],
    homes: dict[str, Homes],
) -> Changes:
    return Changes(version=1, removed=removed, added=added, changed=changed, homes=homes)


@dataclass(frozen=True, slots=True)
class Entries:
    """The models of a fleet file with the changes applied, before paths are resolved."""

    entries: tuple[tuple[str, NamedModelKeys], ...]
    """Each with what an error calls it."""
    changes: Changes
    """Those that still count."""
    notes: tuple[str, ...]
    """Those that do not, each with the reason."""


def merged(file: Sequence[NamedModelKeys], changes: Changes) -> Entries:
    """The entries that are to be served: the file's but those removed, then those added."""
    named = {entry.name for entry in file}
    removed = tuple(n for n in changes.removed if n in named)
    notes = [
        f"{n} was removed; the fleet file does not have it any more"
        for n in changes.removed
        if n not in named
    ]
    entries: list[tuple[str, NamedModelKeys]] = []
    for at, entry in numbered(file):
        if entry.name in removed:
            continue
        if entry.base in removed:
            notes.append(f"{entry.name} is not served: its base, {entry.base}, was removed")
            continue
        entries.append((at, entry))
    added = []
    for entry in changes.added:
        if any(entry.name == other.name for _, other in entries):
            notes.append(f"{entry.name} was added; the fleet file's entry counts instead")
            continue
        if both := {n for _, other in entries for n in other.names}.intersection(entry.names):
            why = f"the fleet file has a model that is called {min(both)}, too"
            notes.append(f"{entry.name} was added; {why}")
            continue
        added.append(entry)
        entries.append((f"{entry.name} (added by an operator)", entry))
    kept = _made(removed, tuple(added), changes.changed, changes.homes)
    return Entries(tuple(entries), kept, tuple(notes))


def changed(
    models: Sequence[ModelSettings], changes: Changes
) -> tuple[tuple[ModelSettings, ...], Changes, tuple[str, ...]]:
    """The models at the levels that operators chose; the changes that still count; notes."""
    left, notes = dict(changes.changed), list[str]()
    kept = changes

    def one(model: T) -> T:
        nonlocal kept
        edit = left.pop(model.name, None)
        if edit is None:
            return model
        was, now, present = said(edit.was), said(edit.now), levels_of(model)
        mine = {}
        for key, value in now.items():
            if key in present and present[key] == was.get(key):
                mine[key] = value
            elif key not in present or present[key] != value:
                notes.append(f"{model.name}: {key} was changed; the fleet file's value counts")
        kept = kept._with_edit(model.name, present, mine)
        return with_levels(model, mine)

    found = tuple(
        replace(one(model), adapters=tuple(one(a) for a in model.adapters)) for model in models
    )
    for name in left:
        notes.append(f"{name} was changed; there is no such model any more")
        kept = kept._with_edit(name, {}, {})
    return found, kept, tuple(notes)


def rehomed(
    models: Sequence[ModelSettings], changes: Changes, devices: Collection[str]
) -> tuple[tuple[ModelSettings, ...], Changes, tuple[str, ...]]:
    """The models on the devices that operators chose, of those there are; the changes that still
    count; notes."""
    there = {m.name: m for m in models}
    kept, notes = changes, list[str]()
    for name, homes in changes.homes.items():
        model = there.get(name)
        missing = [device for device in homes.now if device not in devices]
        if model is not None and model.devices == homes.was and not missing:
            there[name] = replace(model, devices=homes.now)
            continue
        if model is None:
            why = "there is no such model any more"
        elif model.devices != homes.was:
            why = "the fleet file's count"
        else:
            why = f"there is no {missing[0]} any more"
        notes.append(f"the devices of {name} were changed; {why}")
        kept = kept._with_homes(name, (), ())
    return tuple(there.values()), kept, tuple(notes)
