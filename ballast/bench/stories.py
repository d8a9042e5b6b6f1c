"""Create the story files that a command line asks for: a new file for each preset's run.

Used by `bench.run`, `bench.cluster_run` and `bench.simulation`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from ballast.core.entries import Sink
from ballast.core.errors import ConfigError
from ballast.engine.story_file import MODE, StoryFile, parts

SinkOf = Callable[[str], Sink | None]
"""Returns the sink of a device's story; None: it is not written."""


def fresh(path: Path | None, preset: str, presets: Sequence[str]) -> Path | None:
    """An empty file for one preset's run; its name has the preset where there are several.

    Raises ConfigError if it cannot be written.
    """
    if path is None:
        return None
    if len(presets) > 1:
        path = path.with_name(f"{path.stem}-{preset}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for part in parts(path):
            part.unlink()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE))
    except OSError as error:
        raise ConfigError("--story", str(path), f"a file to write: {error.strerror}") from None
    return path


@contextmanager
def stories(path: Path | None) -> Iterator[SinkOf]:
    """Every device's story, in one file; nowhere if `path` is None."""
    with ExitStack() as files:

        def sink(device: str) -> Sink | None:
            if path is None:
                return None
            return files.enter_context(closing(StoryFile(path, device))).write

        yield sink
