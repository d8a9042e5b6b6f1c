"""Assemble each tensor of an architecture from the tensors stored in a checkpoint's files.

A *recipe* is the tensor in row-major order as a sequence of runs of stored tensors. Usually that is
one stored tensor; but `transformers` holds the experts of a layer as one tensor where checkpoints
have one for each, and renames tensors. Its own conversion rules are applied here to recipes instead
of to whole tensors, so that only the bytes that are needed are read, directly to their place.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ballast.core.errors import CheckpointError, UnsupportedModel
from ballast.fleet.gguf_header import BLOCK_PREFIX, SUFFIX
from ballast.kernels import quantised
from ballast.kernels.quantised import PackedRows
from ballast.weights.architecture import Architecture
from ballast.weights.gguf_blocks import BLOCKS, dequantise, take_apart
from ballast.weights.quantisation import unpack
from ballast.weights.stored_tensor import ITEM_BYTES, StoredTensor

if TYPE_CHECKING:  # its import takes seconds, and reading weights does not need it
    from transformers.core_model_loading import WeightConverter

READABLE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of stored tensors that can be read, besides `BLOCKS`."""
_AT_ONCE = 1 << 20
"""Elements that are dequantised at a time, if not one head's have more."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `start .. start + n` of a stored tensor."""

    source: StoredTensor
    start: int
    n: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to read a tensor of `shape`: its runs one after the other."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, source: StoredTensor) -> Recipe:
        runs = tuple(Run(m, 0, math.prod(m.shape)) for m in source.matrices)
        return cls(source.shape, runs)

    @property
    def plain(self) -> StoredTensor | None:
        """The stored tensor that it is read from, if it is only one run."""
        return self.runs[0].source if len(self.runs) == 1 else None

    def cut(self, start: int, n: int) -> tuple[Run, ...]:
        """Return the runs of its elements `start .. start + n`."""
        found, at = [], 0
        for run in self.runs:
            first, last = max(start, at), min(start + n, at + run.n)
            if first < last:
                found.append(Run(run.source, run.start + first - at, last - first))
            at += run.n
        return tuple(found)


def parameters_by_type(plan: Mapping[str, Recipe]) -> dict[str, int]:
    """Count the elements read by recipes, by the type that they are stored in and in its order:
    `BF16`, `AWQ int4`, or of a GGUF file `GGUF Q4_K`."""
    counts: Counter[str] = Counter()
    for run in (run for recipe in plan.values() for run in recipe.runs):
        name = run.source.dtype.removeprefix(BLOCK_PREFIX)
        prefix = BLOCK_PREFIX if run.source.path.suffix == SUFFIX else ""
        counts[prefix + name] += run.n
    return dict(sorted(counts.items()))


def stack(parts: Sequence[Recipe]) -> Recipe:
    """Stack along a new first dimension."""
    return Recipe((len(parts), *parts[0].shape), tuple(run for p in parts for run in p.runs))


def concatenate(parts: Sequence[Recipe], dim: int) -> Recipe:
    shape = list(parts[0].shape)
    shape[dim] = sum(p.shape[dim] for p in parts)
    inner = [math.prod(p.shape[dim:]) for p in parts]
    return Recipe(
        tuple(shape),
        tuple(
            run
            for i in range(math.prod(shape[:dim]))
            for p, n in zip(parts, inner, strict=True)
            for run in p.cut(i * n, n)
        ),
    )


def narrow(recipe: Recipe, dim: int, first: int, n: int) -> Recipe:
    """Return the recipe of `n` elements of dimension `dim`, from `first` on."""
    inner = math.prod(recipe.shape[dim + 1 :])
    rows = math.prod(recipe.shape[:dim])
    runs: list[Run] = []
    for row in range(rows):
        runs += recipe.cut((row * recipe.shape[dim] + first) * inner, n * inner)
    return Recipe((*recipe.shape[:dim], n, *recipe.shape[dim + 1 :]), tuple(runs))


def recipes(
    architecture: Architecture, stored: Mapping[str, StoredTensor], directory: Path
) -> dict[str, Recipe]:
    """Return the recipes of all names in the architecture that the files have tensors for.

    Raises CheckpointError if parts do not fit together, UnsupportedModel if `transformers` would do
    more with them than stack and concatenate.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    shapes = {n: w.shape for _, wanted in architecture.segments for w in wanted for n in w.names}
    renamings = [c for c in architecture.conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in architecture.conversions if isinstance(c, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    base = architecture.base_prefix
    found: dict[str, Recipe] = {}
    parts: dict[str, dict[str, list[Recipe]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, base, shapes)
        if target not in shapes and name in shapes:
            target, pattern = name, None
        if target not in shapes:
            continue
        if pattern is None:
            found.setdefault(target, Recipe.of(stored[name]))
        else:
            group = parts.setdefault(target, {})
            group.setdefault(pattern, []).append(Recipe.of(stored[name]))
    for target, by_source in parts.items():
        converter = by_pattern[next(iter(by_source))]
        try:
            found.update(_convert(converter, by_source, target, shapes))
        except _Unfit as error:
            raise CheckpointError(str(directory), target, str(error)) from error
        except NotImplementedError as error:
            kind = architecture.config.model_type
            raise UnsupportedModel(
                f"{kind}: {target} is stored in a form that needs {error}"
            ) from error
    return found


class _Unfit(Exception):
    """Raised, with the reason, for parts that cannot be put together."""


def _convert(
    converter: WeightConverter,
    by_source: Mapping[str, Sequence[Recipe]],
    target: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Recipe]:
    """Apply the converter's operations to the tensors found for each of its patterns; returns the
    recipes of `target`, the name by the first of its patterns, and of its others."""
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        MergeModulelist,
        Split,
        Transpose,
    )

    missing = [p for p in converter.source_patterns if p not in by_source]
    if missing:
        raise _Unfit(f"nothing is stored for its part {missing[0]}")
    patterns = converter.target_patterns
    targets = [target.replace(patterns[0], pattern) for pattern in patterns]
    lists = {p: list(by_source[p]) for p in converter.source_patterns}
    counts = {p: len(parts) for p, parts in lists.items()}
    if len(set(counts.values())) != 1:
        raise _Unfit(f"its parts are not equally many: {counts}")
    for operation in converter.operations:
        kind, listed = type(operation), [part for parts in lists.values() for part in parts]
        if kind is MergeModulelist and operation.dim == 0:
            lists = {p: [stack(_alike(parts))] for p, parts in lists.items()}
        elif kind is Concatenate:
            lists = {"": [concatenate(_alike(listed, operation.dim), operation.dim)]}
        elif kind is Transpose and len(listed) == 1:
            dims = {operation.dim0, operation.dim1}
            if not operation.check_dims or listed[0].shape != shapes.get(target):
                lists = {"": [_transposed(listed[0], dims)]}
        elif kind in (Chunk, Split) and len(listed) == 1 and all(t in shapes for t in targets):
            found = _split(listed[0], operation.dim, [shapes[t][operation.dim] for t in targets])
            return dict(zip(targets, found, strict=True))
        else:
            raise NotImplementedError(repr(operation))
    ((whole,),) = lists.values()
    if len(targets) != 1:
        raise NotImplementedError("splitting")
    return {target: whole}


def _split(whole: Recipe, dim: int, sizes: Sequence[int]) -> list[Recipe]:
    dim %= len(whole.shape)
    if sum(sizes) != whole.shape[dim]:
        raise _Unfit(f"{whole.shape} cannot be split into {sizes} of dimension {dim}")
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [narrow(whole, dim, first, n) for first, n in zip(firsts, sizes, strict=True)]


def _transposed(whole: Recipe, dims: Collection[int]) -> Recipe:
    """Exchange the last two dimensions; raises NotImplementedError for others, and for tensors that
    are not read element by element."""
    n = len(whole.shape)
    plain = all(
        run.n == math.prod(run.source.shape) and len(run.source.shape) > 1 for run in whole.runs
    )
    odd = any(r.source.transposed or r.source.heads or r.source.is_quantised for r in whole.runs)
    if {d % n for d in dims} != {n - 2, n - 1} or odd or not plain:
        raise NotImplementedError(f"transposing {sorted(dims)}")
    runs = tuple(
        replace(run, source=replace(run.source, shape=_turned(run.source.shape), transposed=True))
        for run in whole.runs
    )
    return Recipe(_turned(whole.shape), runs)


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _alike(parts: Sequence[Recipe], dim: int | None = None) -> Sequence[Recipe]:
    """Return the parts; raises `_Unfit` unless their shapes are equal, except in dimension
    `dim`."""

    def rest(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if dim is None else (*shape[:dim], *shape[dim + 1 :])

    for part in parts:
        if rest(part.shape) != rest(parts[0].shape):
            source = part.runs[0].source
            raise _Unfit(f"{source.name} has shape {part.shape}, others {parts[0].shape}")
    return parts


class Sources:
    """The files behind recipes, open for reading from several threads; a context manager."""

    def __init__(self, plan: Iterable[Recipe]) -> None:
        """Raises OSError if a file cannot be opened."""
        runs = [run for recipe in plan for run in recipe.runs]
        paths = {part.path for run in runs for part in run.source.files}
        with ExitStack() as files:
            self._fds = {p: files.enter_context(open(p, "rb", buffering=0)).fileno() for p in paths}
            self._files = files.pop_all()
        self._dequantised = threading.local()
        """The last matrix that a thread has dequantised: it is filled piece by piece."""

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def descriptor(self, source: StoredTensor) -> int:
        """Descriptor of the file that a tensor of `Stored.files` is read from."""
        return self._fds[source.path]

    def read(self, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        """Read the whole tensor, converted to `dtype`."""
        whole = torch.empty(recipe.shape, dtype=dtype)
        self.fill(recipe, 0, whole.view(-1))
        return whole

    def read_rows(self, recipe: Recipe, form: str) -> PackedRows:
        """Read the rows of a matrix that is stored as one, in a form."""
        source = recipe.plain
        assert source is not None, "a matrix of several runs has no form"
        if source.packing is not None:
            return unpack.rows_of(source, self._whole)
        rows = torch.empty(source.shape[0], source.n_bytes // source.shape[0], dtype=torch.uint8)
        _read(source, self._fds[source.path], source.start, rows.view(-1).numpy().data)
        return take_apart(_in_order(rows, source.heads) if source.heads else rows, form)

    def _whole(self, source: StoredTensor) -> Tensor:
        """Read one of the tensors that a matrix is made of."""
        found = torch.empty(source.n_bytes, dtype=torch.uint8)
        _read(source, self._fds[source.path], source.start, found.numpy().data)
        return found.view(unpack.DTYPES[source.dtype]).view(source.shape)

    def _dequantised_of(self, source: StoredTensor) -> Tensor:
        """Return the elements of a matrix of several tensors, float32, in its order."""
        if getattr(self._dequantised, "source", None) != source:
            assert source.packing is not None, "a matrix of one tensor"
            rows = unpack.rows_of(source, self._whole)
            found = quantised.dequantise(rows, source.packing.form)
            self._dequantised.elements = (found.T if source.transposed else found).reshape(-1)
            self._dequantised.source = source
        elements: Tensor = self._dequantised.elements
        return elements

    def fill(self, recipe: Recipe, start: int, target: Tensor) -> None:
        """Read elements from `start` on into `target` (1-D), converted to its dtype.

        Raises CheckpointError, with file and tensor, if they cannot be read.
        """
        at = 0
        for run in recipe.cut(start, target.numel()):
            self._copy(run, target[at : at + run.n])
            at += run.n

    def _copy(self, run: Run, target: Tensor) -> None:
        source, fd = run.source, self._fds[run.source.path]
        if source.packing is not None:
            target.copy_(self._dequantised_of(source)[run.start : run.start + run.n])
            return
        if source.heads or source.transposed or source.dtype in BLOCKS:
            _dequantise(run, fd, target)
            return
        item_bytes = ITEM_BYTES[source.dtype]
        at = source.start + run.start * item_bytes
        if READABLE[source.dtype] is target.dtype:
            _read(source, fd, at, target.view(torch.uint8).numpy().data)
        else:
            buffer = bytearray(run.n * item_bytes)
            _read(source, fd, at, memoryview(buffer))
            target.copy_(torch.frombuffer(buffer, dtype=READABLE[source.dtype]))


def _dequantise(run: Run, fd: int, target: Tensor) -> None:
    """Read whole blocks, matrices, or the rows of whole heads, some at a time, and keep what
    is in `run`."""
    source, end = run.source, run.start + run.n
    kind = BLOCKS.get(source.dtype)
    elements, n_bytes = (kind.elements, kind.n_bytes) if kind else (1, ITEM_BYTES[source.dtype])
    unit = math.prod(source.shape) // source.heads if source.heads else elements
    unit = math.prod(source.shape[-2:]) if source.transposed else unit
    step = max(1, _AT_ONCE // unit) * unit
    for first in range(run.start // unit * unit, end, step):
        last = min(first + step, -(-end // unit) * unit)
        buffer = bytearray((last - first) // elements * n_bytes)
        _read(source, fd, source.start + first // elements * n_bytes, memoryview(buffer))
        if kind:
            found = dequantise(torch.frombuffer(buffer, dtype=torch.uint8), kind)
        else:
            found = torch.frombuffer(buffer, dtype=READABLE[source.dtype])
        if source.heads:
            rows = source.shape[0] // source.heads * ((last - first) // unit)
            found = _in_order(found.view(rows, -1), (last - first) // unit).view(-1)
        if source.transposed:
            found = found.view(-1, *_turned(source.shape)[-2:]).transpose(1, 2).reshape(-1)
        low, high = max(first, run.start), min(last, end)
        target[low - run.start : high - run.start].copy_(found[low - first : high - first])


def _in_order(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of some heads, stored in the order of GGUF files, in that of
    `transformers`."""
    each = len(rows) // heads // 2
    return rows.view(heads, each, 2, -1).transpose(1, 2).reshape(rows.shape)


def _read(source: StoredTensor, fd: int, at: int, into: Any) -> None:
    done = 0
    while done < len(into):
        try:
            n = os.preadv(fd, [into[done:]], at + done)
        except OSError as error:
            raise source.error(f"cannot be read: {error.strerror}") from error
        if n == 0:
            raise source.error("truncated while it was read")
        done += n
