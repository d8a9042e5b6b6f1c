"""What stands between a decoder's matrices, against the same in PyTorch; and programs of it."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from ballast.kernels import layer, layer_code, linear, team

DTYPES = (torch.float32, torch.bfloat16)


def run(kernel: int, tables: np.ndarray, workers: int) -> None:
    operations = [(kernel, tables.ctypes.data + i * tables.strides[0]) for i in range(len(tables))]
    team.Program(np.array(operations, np.int64).reshape(-1, 2)).run(workers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 2])
def test_norm_of_chosen_rows(dtype: torch.dtype, workers: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 40), torch.randn(40).to(dtype)
    out, index = torch.zeros(4, 40), np.array([8, 0, 3, 3])
    tables = layer.tables(
        1,
        rows=4,
        width=40,
        source=x.data_ptr(),
        source_row=40,
        target=out.data_ptr(),
        target_row=40,
        index=index.ctypes.data,
        weight=weight.data_ptr(),
        epsilon=layer.bits_of(1e-5),
    )
    run(layer.kernel("norm", dtype), tables, workers)
    expected = torch.nn.functional.rms_norm(x[index], (40,), weight.float(), 1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_landing(dtype: torch.dtype, normed: bool) -> None:
    """What lands is normed, if there are weights for that, scaled, and added."""
    torch.manual_seed(4)
    x, weight, out = torch.randn(9, 40), torch.randn(40).to(dtype), torch.randn(9, 40)
    added = torch.nn.functional.rms_norm(x, (40,), weight.float(), 1e-5) if normed else x
    expected = out + added * 0.25
    tables = layer.tables(
        1,
        rows=9,
        item_rows=2,
        width=40,
        source=x.data_ptr(),
        source_row=40,
        target=out.data_ptr(),
        target_row=40,
        weight=weight.data_ptr() if normed else 0,
        epsilon=layer.bits_of(1e-5),
        scale=layer.bits_of(0.25),
    )
    run(layer.kernel("land", dtype), tables, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 5.5])
@pytest.mark.parametrize("packed", [False, True])
def test_embeddings(dtype: torch.dtype, packed: bool, scale: float | None) -> None:
    torch.manual_seed(1)
    weight = torch.randn(130, 36).to(dtype)
    stored = linear.pack(weight) if packed else weight
    ids = np.array([0, 129, 64, 63, 5, 5])
    out = torch.full((6, 36), float("nan"))
    _, steps, _, group = (*linear.packed_shape(130, 36, dtype), 1)[:4]
    tables = layer.tables(
        1,
        rows=6,
        item_rows=4,
        width=36,
        source=stored.data_ptr(),
        source_row=steps * group if packed else 36,
        target=out.data_ptr(),
        target_row=36,
        index=ids.ctypes.data,
        panel_group=group if packed else 0,
        scale=layer.bits_of(scale or 0.0),
    )
    run(layer.kernel("embed" if scale is None else "embed_scaled", dtype), tables, 2)
    assert torch.equal(out, weight.float()[ids] * (1.0 if scale is None else scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, "heads", "heads in float32", "whole"])
@pytest.mark.parametrize("rotary", [16, 8, 0])
def test_rotary_and_kv(dtype: torch.dtype, normed: str | Literal[False], rotary: int) -> None:
    """Queries and keys are normed and rotated; keys and values reach their places."""
    torch.manual_seed(2)
    rows, heads, kv_heads, dim, block_tokens = 5, 4, 2, 16, 4
    x = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    widths = (heads * dim, kv_heads * dim) if normed == "whole" else (dim, dim)
    held = torch.float32 if normed == "heads in float32" else dtype
    weights = [torch.randn(width).to(held) for width in widths]
    angles = torch.rand(rows, rotary // 2) * 6
    cosine, sine = angles.cos(), angles.sin()
    q, k, v = x.clone().view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if normed:
        q, k = (
            torch.nn.functional.rms_norm(
                t.reshape(rows, -1, len(w)), (len(w),), w.float(), 1e-6
            ).view(t.shape)
            for t, w in zip((q, k), weights, strict=True)
        )
    q, k = (_turned(t, cosine, sine, rotary) for t in (q, k))

    kv = torch.zeros(8, 2, block_tokens, kv_heads, dim, dtype=dtype)
    step = kv_heads * dim
    blocks, offsets = np.array([3, 3, 7, 0, 1]), np.array([1, 2, 0, 3, 3])
    places = (blocks * 2 * block_tokens + offsets) * step
    tables = layer.tables(
        1,
        rows=rows,
        item_rows=2,
        width=dim,
        source=x.data_ptr(),
        source_row=x.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        rotary=rotary,
        cosine=cosine.data_ptr(),
        sine=sine.data_ptr(),
        weight=weights[0].data_ptr() if normed else 0,
        key_weight=weights[1].data_ptr() if normed else 0,
        epsilon=layer.bits_of(1e-6),
        kv=kv.data_ptr(),
        places=places.ctypes.data,
        values=block_tokens * step,
        whole=int(normed == "whole"),
    )
    name = "rotary_wide" if normed == "heads in float32" else "rotary"
    run(layer.kernel(name, dtype), tables, 2)
    found = x.view(rows, -1, dim)
    torch.testing.assert_close(found[:, :heads], q, rtol=1e-5, atol=1e-5)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-3}
    for i in range(rows):
        at = kv[blocks[i], :, offsets[i]].float()
        torch.testing.assert_close(at[0], k[i], **near)
        assert torch.equal(at[1].to(dtype), v[i].to(dtype))
        kv[blocks[i], :, offsets[i]] = 0
    assert not kv.any(), "nothing else was written"


def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rotary: int) -> torch.Tensor:
    a, b, rest = x.split([rotary // 2, rotary // 2, x.shape[2] - rotary], 2)
    c, s = cosine[:, None], sine[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), 2)


def test_each_operation_sees_what_the_one_before_wrote() -> None:
    """A long chain of norms, each on the result of the last, with rows spread over threads."""
    torch.manual_seed(3)
    n, rows, width = 60, 16, 24
    x = torch.randn(rows, width)
    weights = torch.rand(n, width) + 0.5
    buffers = [x.clone(), torch.zeros(rows, width)]
    at = np.array([b.data_ptr() for b in buffers])
    steps = np.arange(n)
    tables = layer.tables(
        n,
        rows=rows,
        width=width,
        source=at[steps % 2],
        source_row=width,
        target=at[(steps + 1) % 2],
        target_row=width,
        weight=weights.data_ptr() + steps * width * 4,
        epsilon=layer.bits_of(1e-5),
    )
    kernel = layer.kernel("norm", torch.float32)
    operations = np.stack([np.full(n, kernel), tables.ctypes.data + steps * tables.strides[0]], 1)
    program = team.Program(operations)
    expected = x
    for w in weights:
        expected = torch.nn.functional.rms_norm(expected, (width,), w, 1e-5)
    for workers in (1, 2, 2, 2):
        buffers[0].copy_(x)
        tables[:, layer_code.NEXT] = 0
        program.run(workers)
        torch.testing.assert_close(buffers[n % 2], expected, rtol=1e-4, atol=1e-5)
