"""Watch a download from the hub, and bound it before it begins. Used by `ballast pull`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from typing import Any

from ballast.core.errors import ConfigError
from ballast.core.units import format_bytes

Report = Callable[[int, int], None]
"""Called with the bytes that are there, and those of the files known so far."""


def reporting(report: Report) -> Any:
    """Return a class of progress bars, for the hub's library, that show nothing and `report`."""
    from huggingface_hub.utils import tqdm

    most = 0

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._sink = open(os.devnull, "w")  # noqa: SIM115 - closed with the bar
            super().__init__(*args, **kwargs | {"file": self._sink, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            done: bool | None = super().update(n)
            if self.unit == "B":  # of bytes received, and of bytes written: whichever is ahead
                most = max(most, int(self.n))
                report(most, max(most, int(self.total or 0)))
            return done

        def close(self) -> None:
            super().close()
            self._sink.close()

    return Bar


def check_size(
    name: str,
    revision: str | None,
    patterns: Iterable[str],
    most_bytes: int,
    hub_id: str,
    key: str,
) -> None:
    """Raise ConfigError if the wanted files of a repository are more than `most_bytes`, or than
    the disk of the hub's cache holds."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE

    wanted = tuple(patterns)
    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    n_bytes = sum(
        f.size or 0
        for f in info.siblings or ()
        if any(fnmatch(f.rfilename, pattern) for pattern in wanted)
    )
    os.makedirs(HF_HUB_CACHE, exist_ok=True)
    room = shutil.disk_usage(HF_HUB_CACHE).free
    for bound, what in ((most_bytes, "may be pulled"), (room, f"are free in {HF_HUB_CACHE}")):
        if n_bytes > bound:
            why = f"its files take {format_bytes(n_bytes)}; {format_bytes(bound)} {what}"
            raise ConfigError(key, hub_id, why)
