"""Define quantised panels: the forms in which blocks of weights stay packed on CPU.

A panel holds 64 outputs, as those of `ballast.kernels.linear`. Its inputs are divided into spans,
each with a scale for every output, and spans into blocks of 32 inputs:

::

    span    [scale x 64] [offset x 64] [zero x 64]  block  block  ...
    block   [subscales x 64] [suboffsets x 64]  [codes]  [their high bits]
    matrix  panel  panel  ...  [order of inputs]

A weight is ``scale * subscale * (value of code - zero) + offset * suboffset``, of which a form has
some parts. Codes of 4 to 6 bits lie as 32-bit words, one for each output, with the low four bits of
eight inputs each; then words with the high bits of the block's inputs. Codes of 8 and 16 bits lie
input by input. So one vector load reads a code of many outputs, whatever the form.

A form's name is that of its kind. GGUF's types and MXFP4 are kinds by themselves, and their bits
are those of the type; K-types' subscales of 6 bits take 8. Other formats choose their scales' dtype
and span, and the order in which inputs are read: ``INT4Z-BF16:128``, ``INT4Z-F16:128+d41d8cd9``
(inputs in an order with this digest, so that equal names have equal orders).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ballast.core.units import ceil_div

PANEL = 64
"""Outputs of a panel."""
BLOCK = 32
"""Inputs of a block."""

SCALES = {"F16": 2, "BF16": 2, "F32": 4}
"""Bytes of a scale by its dtype, where formats choose it."""
EXPONENTS = "E8M0"
"""Dtype of scales that are powers of two: a byte, the exponent plus 127 (255 is NaN)."""
_SCALE_BYTES = {**SCALES, EXPONENTS: 1}
_ORDER_ALIGNMENT = 64
_ROUNDED = "/int8"
"""End of the name of a form whose matrices are multiplied by activations in int8."""
DOTS = ("Q4_0", "Q4_1", "Q4_K", "INT4", "INT4Z")
"""Kinds that can be."""
DOTS_K = 32768
"""Most inputs of such a matrix."""


class PanelForm(NamedTuple):
    """How the weights of a panel are written."""

    bits: int
    """Of a code: 4 to 6; 8: a byte; 16: the weight itself, a float16."""
    span: int = BLOCK
    """Inputs that share a scale; a multiple of `BLOCK`."""
    has_offset: bool = False
    """Whether there is an offset beside each scale, both float16."""
    subscales: int = 0
    """Subscales of a block, for equal parts of its inputs; with an offset bytes, else signed."""
    zero: int = 0
    """What is subtracted from codes."""
    has_zeros: bool = False
    """Whether a byte beside each scale is subtracted from codes. Codes of 8 bits are unsigned with,
    and signed without."""
    values: tuple[float, ...] = ()
    """What codes of 4 bits mean; empty: themselves."""
    is_float8: bool = False
    """Whether codes of 8 bits are float8 (E4M3, without infinity)."""
    scale: str = ""
    """Dtype of scales; empty: GGUF's float16, known when the kernel is compiled, as `EXPONENTS`
    are."""
    is_ordered: bool = False
    """Whether int32 indices of the inputs, in the order in which they are read, follow the
    panels."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale."""
        return _SCALE_BYTES[self.scale or "F16"]

    @property
    def head_bytes(self) -> int:
        """Bytes of a span's scales, offsets and zeros."""
        if self.bits == 16:
            return 0
        return PANEL * (self.scale_bytes * (1 + self.has_offset) + self.has_zeros)

    @property
    def subscale_bytes(self) -> int:
        """Bytes of a block before its codes."""
        return PANEL * self.subscales * (1 + self.has_offset)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.subscale_bytes + PANEL * BLOCK * self.bits // 8

    @property
    def span_bytes(self) -> int:
        """Bytes of a span, its blocks included; a multiple of a cache line."""
        return self.head_bytes + self.span // BLOCK * self.block_bytes


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Codes of bitsandbytes' NF4."""
FP4 = (
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0,
    0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
    -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
    -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
)  # fmt: skip
"""Codes of bitsandbytes' FP4."""
E2M1 = (
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
)  # fmt: skip
"""Codes of float4 (E2M1), as in MXFP4."""

FORMS = {
    "F16": PanelForm(16),
    "Q8_0": PanelForm(8),
    "Q4_0": PanelForm(4, zero=8),
    "Q4_1": PanelForm(4, has_offset=True),
    "Q5_0": PanelForm(5, zero=16),
    "Q5_1": PanelForm(5, has_offset=True),
    "Q4_K": PanelForm(4, 256, has_offset=True, subscales=1),
    "Q5_K": PanelForm(5, 256, has_offset=True, subscales=1),
    "Q6_K": PanelForm(6, 256, subscales=2, zero=32),
    "INT4": PanelForm(4, zero=8, scale="F32"),
    "INT4Z": PanelForm(4, has_zeros=True, scale="F32"),
    "INT8": PanelForm(8, scale="F32"),
    "INT8Z": PanelForm(8, has_zeros=True, scale="F32"),
    "FP8": PanelForm(8, is_float8=True, scale="F32"),
    "NF4": PanelForm(4, values=NF4, scale="F32"),
    "FP4": PanelForm(4, values=FP4, scale="F32"),
    "MXFP4": PanelForm(4, values=E2M1, scale=EXPONENTS),
}
"""All kinds by name: the name of the type that they hold (GGUF's, MXFP4), or one whose span, dtype
of scales and order are in the form's name."""
_KINDS = {name: number for number, name in enumerate(FORMS)}
_SCALE_KINDS = {name: number for number, name in enumerate(SCALES)}


def form_name(kind: str, scale: str, span: int, order: str = "") -> str:
    """Return the name of a form of a kind that is no type by itself; `order`: digest of its inputs'
    order."""
    return f"{kind}-{scale}:{span}" + (f"+{order}" if order else "")


@lru_cache(maxsize=1024)
def form_of_name(name: str) -> PanelForm:
    """Return the form of a name. Raises KeyError or ValueError if there is none."""
    kind, _, more = name.removesuffix(_ROUNDED).partition("-")
    form = FORMS[kind]
    if not more:
        return form
    scale, _, rest = more.partition(":")
    span, _, order = rest.partition("+")
    return form._replace(scale=scale, span=int(span), is_ordered=bool(order))


def rounded(name: str, k: int) -> str:
    """Return the form of a matrix of k inputs for activations in int8; as it is if it has none."""
    return name + _ROUNDED if kind_of(name) in DOTS and k <= DOTS_K else name


def is_rounded(name: str) -> bool:
    """Return whether matrices in a form are multiplied by activations in int8."""
    return name.endswith(_ROUNDED)


def exact(name: str) -> str:
    """Return a form's name, whatever its matrices are multiplied by."""
    return name.removesuffix(_ROUNDED)


def kind_of(name: str) -> str:
    """Return the name of a form's kind."""
    return name.removesuffix(_ROUNDED).partition("-")[0]


def number_of(name: str) -> int:
    """Return a form as the kernels' tables hold it: its kind, its scales' dtype (8 bits further)
    and the blocks of its spans (16 bits further)."""
    form = form_of_name(name)
    scale = _SCALE_KINDS.get(form.scale, _SCALE_KINDS["F16"])
    return _KINDS[kind_of(name)] | scale << 8 | form.span // BLOCK << 16


def panel_bytes(name: str, k: int) -> int:
    """Return the bytes of one panel of k inputs."""
    form = form_of_name(name)
    return ceil_div(k, form.span) * form.span_bytes


def order_at(name: str, n: int, k: int) -> int:
    """Return where the order of inputs begins, behind the panels; 0: the form has none."""
    return ceil_div(n, PANEL) * panel_bytes(name, k) if form_of_name(name).is_ordered else 0


def packed_bytes(name: str, n: int, k: int) -> int:
    """Return the bytes of the panels of n outputs and k inputs, and of the order of inputs."""
    order = ceil_div(4 * k, _ORDER_ALIGNMENT) * _ORDER_ALIGNMENT
    panels = ceil_div(n, PANEL) * panel_bytes(name, k)
    return panels + (order if form_of_name(name).is_ordered else 0)
