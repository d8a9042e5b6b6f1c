"""Set PyTorch's default dtype for one thread only, while a module is built.

`torch.set_default_dtype` holds for all threads of a process: concurrent jobs would make tensors in
the new model's dtype, and of two concurrent builds one could leave its dtype set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class DefaultDtype(TorchFunctionMode):
    """Context in which this thread makes tensors in `dtype` where torch would choose its default.

    That is where a floating-point tensor is made from integers and Python's numbers alone, and no
    dtype is named. `torch.get_default_dtype` does not reflect it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor) or made.dtype != torch.get_default_dtype():
            return made
        # `Tensor.float` states float32 by its name, `Tensor.type` states a dtype as text.
        named = func in (Tensor.float, Tensor.type) or _names_dtype([*args, *kwargs.values()])
        return made if named else made.to(self._dtype)


def _names_dtype(values: Sequence[Any]) -> bool:
    """Whether a dtype is among the values, or an array or tensor with a floating-point dtype."""
    for value in values:
        if isinstance(value, torch.dtype):
            return True
        if isinstance(value, Tensor):
            if value.is_floating_point():
                return True
        elif isinstance(value, list | tuple):
            if _names_dtype(value):
                return True
        elif getattr(getattr(value, "dtype", None), "kind", "") == "f":  # NumPy's
            return True
    return False
