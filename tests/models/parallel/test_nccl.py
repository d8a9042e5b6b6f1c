"""What NCCL is asked for, as far as that goes without it: gloo answers in its place."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.core.errors import ConfigError, DeviceError
from ballast.models.parallel.exchanges import GlooExchange, NcclExchange
from ballast.weights.sharding import Shard

GPU = torch.device("cuda", 1)


class Nccl:
    """PyTorch's class, over gloo's. What is not asynchronous returns nothing to wait for."""

    class Options:
        pass

    def __init__(self, store: Any, rank: int, ranks: int, options: Nccl.Options) -> None:
        self.connected: list[torch.device] = []
        self.aborted = False
        self._gloo = GlooExchange(Path(store.path + ".gloo"), Shard(rank, ranks))._group

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert self.connected
        assert not options.asyncOp
        self._gloo.allreduce(tensors, options).wait()

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> None:
        assert self.connected
        assert not options.asyncOp
        assert output.is_contiguous()
        assert given.is_contiguous()
        self._gloo._allgather_base(output, given, options).wait()

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "x")  # and taken back after the test
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


@pytest.mark.usefixtures("nccl")
def test_ranks_add_and_gather(tmp_path: Path) -> None:
    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        exchange = NcclExchange(tmp_path / "meeting", Shard(rank, 2), GPU)
        own = torch.full((2, 3), 1.5 + rank, dtype=torch.bfloat16)
        parts = exchange.all_gather(own, own.new_empty((2, 2, 3))).clone()
        exchange.all_reduce(own)
        exchange.close()
        return parts, own, exchange._group

    with ThreadPoolExecutor(2) as threads:
        for parts, total, group in threads.map(run, range(2)):
            assert [p.unique().tolist() for p in parts] == [[1.5], [2.5]]
            assert total.unique().tolist() == [4.0]
            assert (group.connected, group.aborted) == ([GPU], True)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"


@pytest.mark.usefixtures("nccl")
def test_what_nccl_does_not_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Nccl, device: torch.device) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(Nccl, "eager_connect_single_device", fails)
    with pytest.raises(DeviceError, match="unhandled system error"):
        NcclExchange(tmp_path / "meeting", Shard(0, 1), GPU)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="no NCCL"):
        NcclExchange(tmp_path / "meeting", Shard(0, 2), GPU)
