"""What clients may have pulled from the hub: nothing by default, else what the operator allows."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from ballast.core.settings import PullSettings
from ballast.fleet.schema import NamedModelKeys, PullKeys
from ballast.server.admin.pulls import PullProgress, Pulls
from ballast.server.http.faults import Fault

PROGRAM = """
import sys, pathlib
pathlib.Path(sys.argv[1]).write_text(" ".join(sys.argv[2:]))
print('{"completed": 1, "total": 3}')
print('{"completed": 3, "total": 3}')
if sys.argv[-1] == "org/broken":
    sys.exit("ID: org/broken: there is no such model")
"""


class Admin:
    """What `Pulls` asks of the admin service."""

    def __init__(self, added: int = 0) -> None:
        self.entries: list[NamedModelKeys] = []
        self.changes = SimpleNamespace(added=(None,) * added)

    async def add(self, entry: NamedModelKeys) -> str:
        self.entries.append(entry)
        return entry.name


def pulls(tmp_path: Path, admin: Admin, *models: str, most_models: int = 2) -> Pulls:
    settings = PullSettings(models=models, most_bytes=99, most_models=most_models)
    command = (sys.executable, "-I", "-c", PROGRAM, str(tmp_path / "asked"))
    return Pulls(admin, lambda: settings, command)  # type: ignore[arg-type]


async def collected(found: Any) -> list[PullProgress]:
    return [step async for step in found]


def test_names_are_allowed_by_pattern(tmp_path: Path) -> None:
    assert not pulls(tmp_path, Admin()).allows("org/a")
    some = pulls(tmp_path, Admin(), "org/*", "other/b-GGUF:Q4_*")
    allowed = ("org/a", "hf.co/org/a", "other/b-GGUF:Q4_K_M", "hf:org/a")
    assert all(map(some.allows, allowed))
    refused = ("a", "other/b", "org/../a", "/etc/org", "org/a@main", "org/a/b", "http://org/a")
    assert not any(map(some.allows, refused))


@pytest.mark.parametrize("pattern", ["*", "org", "org/a b", ""])
def test_a_pattern_names_an_organisation(pattern: str) -> None:
    with pytest.raises(ValidationError):
        PullKeys(models=(pattern,))


def test_a_model_is_downloaded_within_its_bound_and_then_served(tmp_path: Path) -> None:
    admin = Admin()
    steps = asyncio.run(collected(pulls(tmp_path, admin, "org/*").pull("hf.co/org/a")))
    assert steps == [PullProgress(1, 3), PullProgress(3, 3)]
    assert (tmp_path / "asked").read_text() == "--json --most 99 org/a"
    assert [(e.name, e.path) for e in admin.entries] == [("hf.co/org/a", "hf:org/a")]


def test_what_cannot_be_pulled_is_not_served(tmp_path: Path) -> None:
    admin = Admin()
    with pytest.raises(Fault, match="there is no such model"):
        asyncio.run(collected(pulls(tmp_path, admin, "org/*").pull("org/broken")))
    full = Admin(added=2)
    with pytest.raises(Fault, match="2 models have been added"):
        asyncio.run(collected(pulls(tmp_path, full, "org/*").pull("org/a")))
    assert admin.entries == full.entries == []


def test_one_is_pulled_at_a_time(tmp_path: Path) -> None:
    async def both() -> None:
        shared = pulls(tmp_path, Admin(), "org/*")
        first = shared.pull("org/a")
        assert await anext(first) == PullProgress(1, 3)
        with pytest.raises(Fault, match="another model"):
            await anext(shared.pull("org/b"))
        await first.aclose()  # its client has left
        assert len(await collected(shared.pull("org/b"))) == 2

    asyncio.run(both())
