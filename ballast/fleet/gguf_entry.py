"""Make a checkpoint directory of a GGUF file: links to its parts, beside what its header says.

The directory has config.json and the tokenizer's files, and is kept in the user's cache. The
weights stay where they are, and are read from there (`ballast.weights.stored`). The header is
parsed in a process of its own (`ballast.weights.gguf_export`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ballast import __version__
from ballast.core.errors import ConfigError
from ballast.fleet.gguf_header import SUFFIX

SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
"""Names of the parts of a split file."""
_MODULE = "ballast.weights.gguf_export"
_FILES = 2
"""Version of the files that are made."""
_SECONDS = 300.0
_KEPT_SECONDS = 7 * 86400.0
"""Time after its last use for which the directory of a file that has gone is kept."""
_DIGITS = 32
_MOST_PARTS = 1000
_PASSED = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
"""Variables of the environment that the process gets: none that holds a secret."""


def is_gguf(local: Path) -> bool:
    """Whether a path means a GGUF file: itself, or a directory that holds one and no other
    weights."""
    if not os.path.isdir(local):
        return local.suffix.lower() == SUFFIX
    try:
        return bool(_files(local)) and not any(local.glob("*.safetensors"))
    except OSError:  # its own fault is named where it is looked into
        return False


def gguf_directory(local: Path, key: str, text: str) -> str:
    """Return the checkpoint directory of the GGUF file at `local`, made where it is not there yet.

    Raises ConfigError naming `key` and its value `text`, with what is wrong with the file.
    """
    try:
        parts = _parts(local, key, text)
        target = _cache(key, text) / _identity(parts)
        if not target.is_dir():
            _make(target, parts, key, text)
            _prune(target.parent)
        os.utime(target)  # it is in use
    except OSError as error:
        why = f"it cannot be read: {error.filename}: {error.strerror}"
        raise ConfigError(key, text, f"{why}; looked in {local}") from error
    return str(target)


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.name.lower().endswith(SUFFIX))


def _parts(local: Path, key: str, text: str) -> list[Path]:
    """Return the parts of the file, in order: itself if it is not split."""
    first = local
    if local.is_dir():
        first, *others = _files(local)
        split = SPLIT.fullmatch(first.name)
        alien = [p for p in others if split is None or not p.name.startswith(f"{split[1]}-")]
        if alien:
            allowed = f"it holds {first.name} and {alien[0].name}: give the path of one of them"
            raise ConfigError(key, text, f"{allowed}; looked in {local}")
    split = SPLIT.fullmatch(first.name)
    count = 1 if split is None else int(split[3])
    names = [first.name]
    if split is not None:
        ending = first.name[-len(SUFFIX) :]
        numbers = range(1, min(count, _MOST_PARTS) + 1)
        names = [f"{split[1]}-{i:05}-of-{split[3]}{ending}" for i in numbers]
    missing = [name for name in names if not os.path.isfile(first.parent / name)]
    if missing or not 1 <= count <= _MOST_PARTS:
        part = f"{len(missing)} of its {count} parts are missing, the first of them {missing[:1]}"
        allowed = "there is no such file: is its volume mounted?" if split is None else part
        raise ConfigError(key, text, f"{allowed}; looked in {local}")
    return [(first.parent / name).absolute() for name in names]


def _identity(parts: list[Path]) -> str:
    """Return a hex digest of the files by place, size and times, and of what reads them."""
    found: list[object] = [_FILES, __version__, importlib.metadata.version("transformers")]
    for path in parts:
        s = path.stat()
        found.append((str(path), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:_DIGITS]


def _cache(key: str, text: str) -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        directory = base / "ballast" / "gguf"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        allowed = "what its header says can be written nowhere: name a directory in XDG_CACHE_HOME"
        raise ConfigError(key, text, f"{allowed} ({error})") from error
    return directory


def _make(target: Path, parts: list[Path], key: str, text: str) -> None:
    files = _exported(parts, key, text)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        for name, content in files.items():
            (scratch / name).write_text(content, encoding="utf-8")
        for path in parts:
            (scratch / f"{path.stem}{SUFFIX}").symlink_to(path)
        scratch.rename(target)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not target.is_dir():  # another process was first
            raise


def _prune(cache: Path) -> None:
    """Remove directories of files that have gone or changed, unless they were used lately."""
    for directory in cache.iterdir():
        with contextlib.suppress(OSError):
            links = [p for p in directory.iterdir() if p.is_symlink()]
            stale = not all(p.exists() for p in links) or len(directory.name) != _DIGITS
            if stale and time.time() - directory.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(directory, ignore_errors=True)


def _exported(parts: list[Path], key: str, text: str) -> dict[str, str]:
    """Run the process that parses the header; returns texts by file name."""
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.getenv("PYTHONPATH"))))
    command = [sys.executable, "-m", _MODULE, *map(str, parts)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(key, text, f"reading its header took over {_SECONDS:.0f} s") from error
    except ValueError as error:
        why = "reading its header ended the process that did it, as too much memory or time does"
        raise ConfigError(key, text, f"{why}; looked in {parts[0]}") from error
    if "error" in answer:
        raise ConfigError(key, text, str(answer["error"]))
    return {name: answer["files"][name] for name in answer["files"] if Path(name).name == name}
