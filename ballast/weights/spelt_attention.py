"""Attend through `transformers`' interface in modules that spell their attention out.

Bloom, Falcon, GPT-Neo, MPT, RemBERT, XGLM and others multiply queries by keys themselves. In a
module prepared here, that product yields scores which compute nothing: they note what is done to
them (a scale, masks, ALiBi) until they are multiplied by values, and then call the attention in
force. ALiBi (Press et al., 3) adds m_h (j - i) to a score; softmax is the same for m_h j, which is
a product of m_h in the query and of j in the key: some more elements of both.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from ballast.core.errors import UnsupportedModel
from ballast.weights.row_call import POSITIONS, SPELT

_EAGER = "eager"
_MASKED = "ballast_spelt"
"""Name of an implementation in `transformers` for which masks are made, without memory."""
_INTERFACE = {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"}
_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm"}
_ALIBI = ("build_alibi_tensor", "build_mpt_alibi_tensor")
_STEP = 256
"""Positions are kept as a multiple of it and a rest, each of which bfloat16 represents."""


@dataclass(slots=True)
class _InForce:
    """The attention by which the modules of one model attend at present."""

    name: str = _EAGER
    alibi: bool = False
    """Whether they have ALiBi, and no other positions."""

    @property
    def attend(self) -> Callable[..., Any] | None:
        """None: as the modules spell it out."""
        return None if self.name == _EAGER else AttentionInterface._global_mapping[self.name]


def prepare(module: nn.Module) -> None:
    """Prepare all modules of a model that spell their attention out; `set_attention` chooses."""
    parts = [part for part in module.modules() if _spells(part)]
    if not parts:
        return
    force = _InForce()
    setattr(module, SPELT, force)
    for number, part in enumerate(parts):
        if not isinstance(getattr(part, "layer_idx", None), int):
            part.layer_idx = number  # type: ignore[assignment]
        part.forward = _attending(part, part.forward, force)
    for part in module.modules():
        for name in _ALIBI:
            if hasattr(part, name):
                setattr(part, name, _sloping(getattr(part, name), force))
                force.alibi = True


def set_attention(module: Any, name: str) -> None:
    """Make a model attend by `name`, as `set_attn_implementation` does, in prepared modules too."""
    force: _InForce | None = vars(module).get(SPELT)
    if force is None:
        module.set_attn_implementation(name)
        return
    force.name = name
    masks = name if name in AttentionMaskInterface._global_mapping else _MASKED
    for part in module.modules():
        if isinstance(getattr(part, "config", None), PreTrainedConfig):
            part.config._attn_implementation_internal = masks


def _spells(part: nn.Module) -> bool:
    if sum(isinstance(child, nn.Linear | Conv1D) for child in part.children()) < 2:
        return False
    names: set[str] = set()
    for base in type(part).__mro__[: type(part).__mro__.index(nn.Module)]:
        for function in vars(base).values():
            found = inspect.unwrap(getattr(function, "__func__", function))
            names.update(getattr(getattr(found, "__code__", None), "co_names", ()))
    return "softmax" in names and not names & _INTERFACE


def _attending(part: nn.Module, forward: Callable[..., Any], force: _InForce) -> Callable[..., Any]:
    def run(*args: Any, **more: Any) -> Any:
        attend = force.attend
        if attend is None:
            return forward(*args, **more)
        with _Products(part, attend):
            return forward(*args, **more)

    return run


class _Products(TorchFunctionMode):
    """Makes the first product of two tensors that are no matrices the scores of `part`."""

    def __init__(self, part: nn.Module, attend: Callable[..., Any]) -> None:
        super().__init__()
        self._part, self._attend, self._found = part, attend, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more, name = kwargs or {}, getattr(func, "__name__", "")
        factors = args[1:] if name == "baddbmm" else args
        if self._found or name not in _PRODUCTS or any(x.ndim < 3 for x in factors):
            return func(*args, **more)
        self._found = True
        scores = _Scores(self._part, self._attend, factors[0], factors[1].transpose(-1, -2))
        return scores if name != "baddbmm" else scores * more["alpha"] + args[0]


@dataclass(slots=True, eq=False)
class _Scores:
    """Scores of queries and keys (..., T, head_dim), none of which is computed."""

    part: Any
    attend: Callable[..., Any]
    query: Tensor
    key: Tensor
    scale: float = 1.0
    slopes: Tensor | None = None
    """(heads,) of ALiBi."""
    operands: tuple[Tensor, ...] = ()
    """What was added to them, and by what they were masked."""
    window: tuple[int | None, ...] = ()
    """The window of a mask of the module's own, if there is one."""
    unfilled: bool = False
    """Whether they were multiplied by a mask: what is added next is where it is zero."""
    viewed: tuple[int, ...] = ()
    dtype: torch.dtype = field(default=torch.float32)

    def __post_init__(self) -> None:
        self.dtype = self.query.dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        scores = next(x for x in args if isinstance(x, cls))
        others = [x for x in args if x is not scores]
        if name in ("softmax", "dropout", "max", "maximum"):
            return scores
        if name in ("add", "__add__", "__radd__"):
            return scores + others[0]
        if name == "where":
            return scores._masked(others[0])
        if name in _PRODUCTS and args[0] is scores:
            return scores @ args[1]
        raise TypeError(f"scores of attention are given to {name}")

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def shape(self) -> torch.Size:
        lead = map(max, self.query.shape[:-2], self.key.shape[:-2])
        return torch.Size(self.viewed or (*lead, self.query.shape[-2], self.key.shape[-2]))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *sizes: int) -> _Scores:
        rest = math.prod(self.shape) // max(1, -math.prod(sizes)) if -1 in sizes else 0
        return replace(self, viewed=tuple(rest if n == -1 else n for n in sizes))

    reshape = view

    def to(self, *_: Any, **__: Any) -> _Scores:
        return self

    def __getattr__(self, name: str) -> Any:
        if name in ("float", "type_as", "contiguous"):
            return self.to
        raise AttributeError(f"scores of attention have no {name}")

    def __mul__(self, by: Any) -> _Scores:
        if isinstance(by, Tensor):
            return replace(self._masked(by), unfilled=True)
        slopes = None if self.slopes is None else self.slopes * by
        return replace(self, scale=self.scale * by, slopes=slopes)

    def __truediv__(self, by: float) -> _Scores:
        return self * (1 / by)

    def __add__(self, other: Any) -> _Scores:
        if isinstance(other, _Slopes):
            return replace(self, slopes=other.values)
        if self.unfilled:
            return replace(self, unfilled=False)
        return replace(self, operands=(*self.operands, other))

    def masked_fill(self, mask: Tensor, value: float) -> _Scores:
        return self + mask

    def _masked(self, mask: Tensor) -> _Scores:
        own = [b for b in self.part.buffers(recurse=False) if b.ndim > 1 and b.shape[-1] > 1]
        if not own:
            return self + mask
        if not hasattr(self.part, SPELT):
            setattr(self.part, SPELT, _window_of(own[0]))
        return replace(self, window=(getattr(self.part, SPELT),))

    def __matmul__(self, value: Tensor) -> Tensor:
        """Return the attention (..., T, head_dim of values)."""
        query, key, values = (x if x.ndim == 4 else x[None] for x in (self.query, self.key, value))
        key, values = (_own_heads(self.part, x, query.shape[1]) for x in (key, values))
        query, key = query.to(value.dtype), key.to(value.dtype)
        if self.slopes is not None:
            query, key = _with_positions(query, key, self.slopes / self.scale)
        out, _ = self.attend(
            self.part,
            query,
            key,
            values,
            None,
            scaling=self.scale,
            sliding_window=next(iter(self.window), None),
            spelt=(self.operands, self.window),
        )
        rows: Tensor = out.transpose(1, 2)
        return rows if value.ndim == 4 else rows[0]


def _own_heads(part: Any, x: Tensor, heads: int) -> Tensor:
    """Return keys or values (1, n, T, d) with each head once, which newer Falcons repeat for all
    queries of its group."""
    repeats = heads // part.num_kv_heads if getattr(part, "new_decoder_architecture", False) else 1
    return x[:, ::repeats]


def _window_of(buffer: Tensor) -> int | None:
    """Return the window that a mask (..., n, n) lets through; None: all of the past."""
    n = buffer.shape[-1]
    seen = buffer.reshape(-1, n, n)[0].bool()
    window = int(seen[-1].sum())
    back = torch.arange(n)[:, None] - torch.arange(n)
    if not torch.equal(seen.cpu(), (back >= 0) & (back < window)):
        raise UnsupportedModel("a mask of its own is none of the past, nor of a window of it")
    return None if window == n else window


# -- ALiBi ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slopes:
    """Stands for the biases (heads, 1, keys) that a model makes of its slopes (heads,)."""

    values: Tensor
    shape = (0, 1, 1)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, _: Any) -> _Slopes:
        return self

    def baddbmm(self, batch1: Tensor, batch2: Tensor, beta: float, alpha: float) -> Any:
        """In force are `_Products`, which make scores of two factors."""
        scores: Any = torch.bmm(batch1, batch2)
        return scores * alpha + _Slopes(self.values * beta)


def _sloping(build: Callable[..., Tensor], force: _InForce) -> Callable[..., Any]:
    """Make a model's biases of (mask, heads) or (heads, keys) their slopes, as its own for two keys
    differ."""

    def run(first: Any, second: int, *args: Any, **more: Any) -> Any:
        if force.attend is None:
            return build(first, second, *args, **more)
        two = isinstance(first, Tensor)
        given = (first.new_ones(1, 2), second) if two else (first, 2)
        more |= {"dtype": torch.float32} if "dtype" in more else {}
        biases = build(*given, *args, **more)
        return _Slopes(biases[:, 0, 1] - biases[:, 0, 0])

    return run


def _with_positions(query: Tensor, key: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Append slopes (heads,) to queries and positions to keys, each in two parts, so that products
    are as exact in bfloat16."""
    positions = POSITIONS.get()
    assert positions is not None  # `RowCall` sets them
    rest = positions % _STEP
    coarse = slopes.bfloat16().to(slopes.dtype)
    fine = slopes - coarse
    more = torch.stack([coarse, coarse, fine, fine], -1).to(query.dtype)
    places = torch.stack([positions - rest, rest, positions - rest, rest], -1).to(key.dtype)
    queries = more[None, :, None].expand(*query.shape[:3], -1)
    keys = places[None, None].expand(*key.shape[:3], -1)
    return torch.cat([query, queries], -1), torch.cat([key, keys], -1)


def _no_mask(
    batch_size: int, q_length: int, kv_length: int, device: torch.device, **unused: Any
) -> Tensor:
    """Return a mask that takes no memory, and that no attention of ours reads."""
    none = torch.zeros((), dtype=torch.bool, device=device)
    return none.expand(batch_size, 1, q_length, kv_length)


AttentionMaskInterface.register(_MASKED, _no_mask)
