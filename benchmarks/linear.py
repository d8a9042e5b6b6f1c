"""Linear layers on weights that come from memory: Ballast's kernel beside PyTorch's two ways.

Per dtype of the weights, shape (outputs x inputs) and number of rows: Ballast's kernel on packed
panels, `F.linear` on the matrix as a checkpoint has it, and oneDNN on what it packs for itself.
Inputs have the dtype that each takes: float32 for ours, the weights' for the others. All run in
turns in one process, and every call takes the next of many equal layers, so that none finds its
weights in a cache. `speedup` is the time of the quicker of the other two over that of ours;
`read` is how much of the read bandwidth of all threads ours makes use of. Where oneDNN does not
pack a dtype on this CPU, its column is empty.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from ballast.core.units import MiB
from ballast.kernels import linear as ours
from ballast.kernels import team
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.known_gemms import onednn_packs, packed

SHAPES = {
    "2304x768": "110M, queries, keys and values",
    "4096x768": "110M, gate and up",
    "768x2048": "110M, down",
    "32000x768": "110M, logits",
    "7168x1280": "500M, gate and up",
    "1280x3584": "500M, down",
}
ROWS = (1, 4, 16, 64, 256, 512)
QUICK_SHAPES = ("2304x768", "1280x3584")
QUICK_ROWS = (1, 16, 256)
COLD = 224 * MiB
"""Weights that a variant's calls cycle through."""
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=[*NAMES], help="only weights of this dtype")
    parser.add_argument("--shape", choices=[*SHAPES], help="only this shape")


def read_bandwidth() -> float:
    """Bytes per second of adding up what lies in memory."""
    values = torch.ones(COLD // 4)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - start)
    return values.nbytes / statistics.median(seconds)


class Layers:
    """Equal layers, more than a cache holds, in the three forms; `seconds` of one call each."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        count = max(2, -(-COLD // (n * k * dtype.itemsize)))
        one = (torch.randn(n, k) / k**0.5).to(dtype)
        self.plain = [one.clone() for _ in range(count)]
        panels = ours.pack(one)
        self.panels = [panels.clone() for _ in range(count)]
        addresses = np.array([p.data_ptr() for p in self.panels])
        self.tables = ours.tables(addresses, n, k)
        self.kernel = ours.kernel(dtype)

    def prepare(self, rows: int) -> dict[str, Callable[[], float]]:
        """The variants for so many rows; checks that they compute the same."""
        count = len(self.plain)
        x, out = torch.randn(rows, self.k), torch.empty(rows, self.n)
        narrow = x.to(self.dtype)
        threads = torch.get_num_threads()
        made, size = self.tables.ctypes.data, self.tables.strides[0]
        ours.place(self.tables, rows, (x.data_ptr(), self.k), (out.data_ptr(), self.n))

        def call_ours(i: int) -> Tensor:
            ours.place(self.tables[i], rows, (x.data_ptr(), self.k), (out.data_ptr(), self.n))
            team.run(self.kernel, made + i * size, threads)
            return out

        def call_plain(i: int) -> Tensor:
            return torch_linear(narrow, self.plain[i])

        calls_of: dict[str, Callable[[int], object]] = {"ours": call_ours, "plain": call_plain}
        if onednn_packs(self.dtype):
            # Packing may depend on the number of rows.
            products = [packed(weight, narrow) for weight in self.plain]
            calls_of["onednn"] = lambda i: products[i]()

        expected = torch_linear(x, self.plain[0].float())
        error = 1e-4 if self.dtype == torch.float32 else 0.1
        for call in calls_of.values():
            product = call(0)
            assert isinstance(product, Tensor)
            torch.testing.assert_close(product.float(), expected, rtol=0.0, atol=error)

        calls = max(1, min(count // 4, 64 // rows))
        return {name: timed(call, calls, count) for name, call in calls_of.items()}


def timed(call: Callable[[int], object], calls: int, count: int) -> Callable[[], float]:
    """Mean seconds of `calls` calls, which go on where the last ones stopped, modulo `count`."""
    at = 0

    def seconds() -> float:
        nonlocal at
        start = time.perf_counter()
        for _ in range(calls):
            call(at)
            at = (at + 1) % count
        return (time.perf_counter() - start) / calls

    return seconds


def entry(taken: dict[str, Samples], rows: int, layers: Layers, bandwidth: float) -> dict[str, Any]:
    us = {name: samples.median * 1e6 for name, samples in taken.items()}
    weights = layers.n * layers.k * layers.dtype.itemsize
    mine = us["ours"] * 1e-6
    return {
        "us": us,
        "speedup": min(t for name, t in us.items() if name != "ours") / us["ours"],
        "gflops": 2 * rows * layers.n * layers.k / mine / 1e9,
        "of_read_bandwidth": weights / mine / bandwidth,
    }


def main() -> None:
    args = options(__doc__, extra=extra)
    rounds = 5 if args.quick else 9
    shapes = [args.shape] if args.shape else QUICK_SHAPES if args.quick else list(SHAPES)
    bandwidth = read_bandwidth()
    Console().print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    result: dict[str, Any] = {"read_bandwidth": bandwidth}
    columns = ("ours", "F.linear", "oneDNN", "speedup", "GFLOP/s", "read")
    table = Table("shape", "rows", *columns, title="linear: microseconds of a call")
    for name in [args.dtype] if args.dtype else NAMES:
        by_shape = result[name] = {}
        table.add_section()
        table.add_row(name)
        for shape in shapes:
            n, k = (int(part) for part in shape.split("x"))
            layers = Layers(n, k, NAMES[name])
            by_rows = by_shape[shape] = {}
            for rows in QUICK_ROWS if args.quick else ROWS:
                taken = interleave(layers.prepare(rows), rounds, warmup=1)
                found = by_rows[str(rows)] = entry(taken, rows, layers, bandwidth)
                us = found["us"]
                figures = [f"{us[v]:.0f}" if v in us else "" for v in ("ours", "plain", "onednn")]
                figures += [f"{found['speedup']:.2f}", f"{found['gflops']:.0f}"]
                share = f"{found['of_read_bandwidth']:.0%}"
                table.add_row(shape, str(rows), *figures, share)
        everything = [e for by_rows in by_shape.values() for e in by_rows.values()]
        by_shape["least_speedup"] = min(e["speedup"] for e in everything)
    finish(args, "linear", result, table)


if __name__ == "__main__":
    main()
