"""Find the models that lie in folders, or in the hub's cache, for a new fleet file.

Used by `ballast init`. Reads names and small JSON files only; what it finds has not been tried.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.fleet.entry_directory import ADAPTER, CHECKPOINT
from ballast.fleet.gguf_header import SUFFIX
from ballast.fleet.unfinished_download import unfinished

DEPTH = 4
"""Folders below the one that is searched."""
_PROJECTOR = "mmproj"
"""Start of the name of a GGUF file with a vision encoder, which is no model of its own."""
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_FIRST_PART = re.compile(r"-00001-of-\d{5}$")
_REPOSITORY = re.compile(r"models--(.+?)--(.+)")
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A checkpoint or an adapter, as an entry of a fleet file."""

    name: str
    path: str
    """A path, or a hub id ``hf:org/name``."""
    directory: Path
    """Where its files are; of a GGUF model, the file."""
    base: str | None = None
    """Of an adapter, what its configuration calls its base; then, the name of the base's entry."""

    @property
    def is_adapter(self) -> bool:
        """Whether it stands on another entry."""
        return self.base is not None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that looks like a model and is no entry."""

    path: str
    reason: str


def search(folders: Sequence[Path]) -> tuple[list[FoundModel], list[LeftOut]]:
    """Return the models below some folders, which may be the hub's cache, with names of their own,
    adapters last; and what is left out."""
    found: list[FoundModel] = []
    left: list[LeftOut] = []
    for folder in folders:
        for one in _below(folder.expanduser().absolute(), DEPTH):
            found.append(one) if isinstance(one, FoundModel) else left.append(one)
    found = [m for i, m in enumerate(found) if m.directory not in {f.directory for f in found[:i]}]
    models = _named([m for m in found if not m.is_adapter], set())
    adapters = []
    for adapter in _named([m for m in found if m.is_adapter], {m.name for m in models}):
        base = _base_of(adapter, models)
        if base is None:
            why = f"an adapter of {adapter.base!r}, which is not among these models"
            left.append(LeftOut(adapter.path, why))
        else:
            adapters.append(replace(adapter, base=base.name))
    return [*models, *adapters], left


def _below(folder: Path, depth: int) -> Iterator[FoundModel | LeftOut]:
    """Yield what lies in a folder and below it; a checkpoint's own folders are not looked into."""
    repository = _REPOSITORY.fullmatch(folder.name)
    if repository is not None and (folder / "snapshots").is_dir():
        yield from _of_repository(folder, f"{repository[1]}/{repository[2]}")
        return
    found = list(_in(folder, folder.name, str(folder)))
    yield from found
    if found and not all(str(m.path).lower().endswith(SUFFIX) for m in found):
        return
    if depth:
        for path in _entries(folder):
            if path.is_dir() and not path.name.startswith("."):
                yield from _below(path, depth - 1)


def _of_repository(folder: Path, hub_id: str) -> Iterator[FoundModel | LeftOut]:
    """Yield the models of a repository in the hub's cache, in the revision that `main` means."""
    main = _text(folder / "refs" / "main").strip()
    revisions = [p for p in _entries(folder / "snapshots") if p.is_dir()]
    chosen = next((p for p in revisions if p.name == main), revisions[-1] if revisions else None)
    if chosen is None:
        yield LeftOut(str(folder), "the hub's cache has no snapshot of it")
        return
    path = f"hf:{hub_id}" + ("" if chosen.name == main else f"@{chosen.name}")
    yield from _in(chosen, hub_id.rpartition("/")[2], path)


def _in(folder: Path, name: str, path: str) -> Iterator[FoundModel | LeftOut]:
    """Yield the checkpoint, the adapter or the GGUF files in a folder itself; `name` and `path`:
    what an entry of the folder is called and says."""
    there = _entries(folder)
    names = {p.name for p in there}
    files = [p for p in there if p.name.lower().endswith(SUFFIX)]
    tensors = [n for n in names if n.endswith(".safetensors")]
    if ADAPTER.file in names:
        base = str(_json(folder / ADAPTER.file).get("base_model_name_or_path") or "")
        yield FoundModel(name, path, folder, base)
    elif CHECKPOINT.file in names and tensors:
        yield FoundModel(name, path, folder)
    elif CHECKPOINT.file in names and not files:
        pickled = any(n.endswith((".bin", ".pt", ".pth")) for n in names)
        why = "its weights are in PyTorch's pickle format, which is not read"
        default = why if pickled else "it has no *.safetensors"
        yield LeftOut(path, unfinished(folder) or default)
    else:
        for file in files:
            if not file.name.startswith(_PROJECTOR) and not _LATER_PART.search(file.stem):
                yield FoundModel(_FIRST_PART.sub("", file.stem), str(file), file)


def _base_of(adapter: FoundModel, models: Iterable[FoundModel]) -> FoundModel | None:
    """Return the model that an adapter's configuration names: by directory, hub id, or the last
    part of either."""
    wanted = (adapter.base or "").rstrip("/")
    last = wanted.rpartition("/")[2]
    by_directory = (os.path.normpath(adapter.directory / wanted), os.path.normpath(wanted))
    exact = (m for m in models if m.path == f"hf:{wanted}" or str(m.directory) in by_directory)
    named = (m for m in models if last and last in (m.name, m.directory.name))
    return next(exact, None) or next(named, None)


def _named(models: Iterable[FoundModel], taken: set[str]) -> list[FoundModel]:
    """Give models names that a fleet file may have, each once."""
    result = []
    for model in models:
        plain = _FOREIGN.sub("-", model.name).strip("-._") or "model"
        numbers = (f"{plain}-{i}" for i in range(2, len(taken) + 3))
        name = next(n for n in (plain, *numbers) if n not in taken)
        taken.add(name)
        result.append(replace(model, name=name))
    return result


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _json(file: Path) -> dict[str, object]:
    try:
        values = json.loads(_text(file))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
