"""Cache measured choices between linear kernels in a file of the user's cache directory.

Used by `choices` and by the doctor. Entries are separate for each kind of CPU, PyTorch version and
number of threads, so several machines may share the file. It is only a cache: choices that cannot
be read are measured again, and choices that cannot be written are not kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ballast.core.units import MiB
from ballast.fleet.atomic_file import locked, replace
from ballast.kernels.vector_code import LANES

log = logging.getLogger(__name__)

VARIABLE = "BALLAST_CHOICES"
"""Environment variable: the file's path; empty: nothing is measured or kept."""
FILE_NAME = "kernel-choices.json"
KERNELS = 2
"""Version of our kernels, raised when a change invalidates earlier measurements."""
_MOST_BYTES = MiB
_MOST_MACHINES = 32
"""Bound of the machines in the file; the oldest ones are dropped first."""
_LIMITS = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"
"""Environment variables that hide instructions from oneDNN, or from our compiler."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class KernelChoice(_Part):
    """Measurements of one matrix, and the choice that follows."""

    from_rows: Annotated[int, Field(ge=1)] | None
    """Rows from which oneDNN's kernel is used; None: never."""
    ratios: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    """oneDNN's time over our kernel's, by number of rows."""


class MachineChoices(_Part):
    """Measurements with one kind of CPU, one PyTorch and one number of threads."""

    cpu: str
    torch: str
    threads: int
    choices: dict[str, KernelChoice] = {}
    """By shape, as `choices.py` names it."""


class _Content(_Part):
    version: Literal[1] = 1
    machines: dict[str, MachineChoices] = {}
    """By a digest of everything that a measurement depends on."""


class ChoiceFile:
    """Implements a cache of choices for the machine that this process runs on."""

    def __init__(self, path: Path | None) -> None:
        """None: nothing is kept."""
        self._path = path

    @classmethod
    def of_user(cls) -> ChoiceFile | None:
        """By `BALLAST_CHOICES`, else beside the compiled kernels where these have a directory
        (`NUMBA_CACHE_DIR`), else in the user's cache directory. None: nothing is to be measured."""
        named = os.environ.get(VARIABLE)
        return None if named == "" else cls(default_path() if named is None else Path(named))

    @property
    def path(self) -> Path | None:
        """The file; None: nothing is kept."""
        return self._path

    def find(self, shape: str) -> KernelChoice | None:
        """Find the choice for a shape and as many threads as the calling thread may use."""
        found = self._read().machines.get(_key(_machine()))
        return None if found is None else found.choices.get(shape)

    def keep(
        self, shape: str, choice: KernelChoice, instead_of: KernelChoice | None = None
    ) -> KernelChoice:
        """Store a choice unless another process has stored one meanwhile; return the stored one, or
        `choice` if writing fails. After a failure nothing more is written.

        `instead_of`: an unusable choice that `find` returned, to be replaced.
        """
        if self._path is None:
            return choice
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._path.parent):
                return self._merge(self._path, shape, choice, instead_of)
        except OSError as error:
            self._give_up(error)
            return choice

    def fault(self) -> str | None:
        """Return why choices cannot be kept; None if they can, as far as can be told without
        writing."""
        if self._path is None:
            return "this user has no directory for caches"
        above = self._path
        while not os.path.lexists(above):
            above = above.parent
        if above.is_dir() or above == self._path:
            needed = os.W_OK if above == self._path else os.W_OK | os.X_OK
            return None if os.access(above, needed) else f"{above} cannot be written"
        return f"{above} is no directory"

    def _give_up(self, error: OSError) -> None:
        """Log, once, that nothing can be read or kept."""
        log.warning("kernels are measured anew at each start: %s: %s", self._path, error)
        self._path = None

    def here(self) -> list[MachineChoices]:
        """Return the choices for this CPU and PyTorch, by number of threads."""
        kept = self._read().machines
        same = [m for key, m in kept.items() if key == _key(_machine(m.threads))]
        return sorted(same, key=lambda m: m.threads)

    def _read(self) -> _Content:
        if self._path is None:
            return _Content()
        try:
            with open(self._path, "rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise OSError(f"it has more than {_MOST_BYTES} bytes")
            return _Content.model_validate_json(data)
        except FileNotFoundError:
            return _Content()
        except ValidationError as error:
            log.warning("choices of kernels in %s are ignored: %s", self._path, error)
            return _Content()
        except OSError as error:
            self._give_up(error)
            return _Content()

    def _merge(
        self, path: Path, shape: str, choice: KernelChoice, instead_of: KernelChoice | None
    ) -> KernelChoice:
        machine = _machine()
        key = _key(machine)
        machines = dict(self._read().machines)
        found = machines.pop(key, machine)
        kept = found.choices.get(shape)
        if kept is not None and kept != instead_of:
            return kept
        choices = {**found.choices, shape: choice}
        machines[key] = found.model_copy(update={"choices": choices})
        newest = dict(list(machines.items())[-_MOST_MACHINES:])
        replace(path, _Content(machines=newest).model_dump_json(indent=1).encode() + b"\n")
        return choice


def default_path() -> Path | None:
    for variable, below in (("NUMBA_CACHE_DIR", ""), ("XDG_CACHE_HOME", "ballast")):
        directory = os.environ.get(variable)
        if directory and os.path.isabs(directory):
            return Path(directory, below, FILE_NAME)
    try:
        return Path.home() / ".cache" / "ballast" / FILE_NAME
    except RuntimeError:  # a user without a home
        return None


def _machine(threads: int | None = None) -> MachineChoices:
    """This one, without choices. `threads`: as many as the calling thread may use, if not given."""
    threads = torch.get_num_threads() if threads is None else threads
    return MachineChoices(cpu=cpu_facts()[0], torch=torch.__version__, threads=threads)


def _key(machine: MachineChoices) -> str:
    facts = (
        *cpu_facts(),
        torch.backends.cpu.get_cpu_capability(),
        *(os.environ.get(name, "") for name in _LIMITS),
        str(LANES),
        machine.torch,
        str(machine.threads),
        str(KERNELS),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def cpu_facts() -> tuple[str, str]:
    """Name and instructions of the first CPU, as Linux shows them."""
    facts: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip().lower(), value.strip())
    name = facts.get("model name") or facts.get("cpu part") or platform.machine()
    return name, facts.get("flags") or facts.get("features") or ""
