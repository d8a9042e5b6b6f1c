"""Define quantised panels: the forms in which blocks of weights stay packed on CPU.

A panel holds 64 outputs, as those of `ballast.kernels.linear`. Its inputs are divided into spans,
each with a scale for every output, and spans into blocks of 32 inputs:

::

    span    [scale x 64] [offset x 64]  block  block  ...
    block   [subscales x 64] [suboffsets x 64]  [codes]  [their high bits]

A weight is ``scale * subscale * (code - zero) + offset * suboffset``, of which a form has some
parts. Codes of 4 to 6 bits lie as 32-bit words, one for each output, with the low four bits of
eight inputs each; then words with the high bits of the block's inputs. Codes of 8 and 16 bits lie
input by input. So one vector load reads a code of many outputs, whatever the form.

The bits of a weight are those of GGUF's type of that name; K-types' subscales of 6 bits take 8.
"""

from __future__ import annotations

from typing import NamedTuple

from ballast.core.units import ceil_div

PANEL = 64
"""Outputs of a panel."""
BLOCK = 32
"""Inputs of a block."""


class PanelForm(NamedTuple):
    """How the weights of a panel are written."""

    bits: int
    """Of a code: 4 to 6; 8: a signed byte; 16: the weight itself, a float16."""
    span: int = BLOCK
    """Inputs that share a scale; a multiple of `BLOCK`."""
    has_offset: bool = False
    """Whether there is an offset beside each scale, both float16."""
    subscales: int = 0
    """Subscales of a block, for equal parts of its inputs; with an offset bytes, else signed."""
    zero: int = 0
    """What is subtracted from codes."""

    @property
    def head_bytes(self) -> int:
        """Bytes of a span's scales and offsets."""
        scales = 0 if self.bits == 16 else 1 + self.has_offset
        return PANEL * 2 * scales

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
}
"""All forms by name: GGUF's name of the type that they hold."""
NUMBERS = {name: number for number, name in enumerate(FORMS)}
"""Numbers of forms, as the kernels' tables hold them."""


def panel_bytes(name: str, k: int) -> int:
    """Return the bytes of one panel of k inputs."""
    form = FORMS[name]
    return ceil_div(k, form.span) * form.span_bytes


def packed_bytes(name: str, n: int, k: int) -> int:
    """Return the bytes of the panels of n outputs and k inputs."""
    return ceil_div(n, PANEL) * panel_bytes(name, k)
