"""Which attention a model on a GPU gets, and what is said of the others."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from ballast.core.errors import ConfigError
from ballast.kernels import device_attention
from ballast.kernels.device_attention import Fit, choose, why_not_flashinfer, why_not_varlen
from ballast.kernels.device_kv import DeviceKv

USUAL = Fit(torch.bfloat16, 128, 16, (9, 0))
AMPERE = replace(USUAL, capability=(8, 0))


def cache(dtype: torch.dtype) -> DeviceKv:
    return DeviceKv(torch.zeros(2, 1, 2, 16, 1, 64, dtype=dtype))


@pytest.mark.parametrize(
    ("version", "fit", "why"),
    [
        ("FA2", USUAL, "multiples of 256"),
        ("FA2", replace(USUAL, block_tokens=512), None),
        ("FA2", replace(USUAL, block_tokens=256, capability=(7, 5)), "older than"),
        ("FA3", USUAL, None),
        ("FA3", AMPERE, "FA3 is not for this GPU"),
        ("FA4", replace(USUAL, capability=(10, 0)), None),
        ("FA3", replace(USUAL, dtype=torch.float32), "float32"),
        ("FA3", replace(USUAL, head_dim=36), "heads of 36"),
        ("FA3", replace(USUAL, head_dim=512), "heads of 512"),
        ("FA3", replace(USUAL, sinks=True), "no sinks"),
    ],
)
def test_what_pytorch_can(
    monkeypatch: pytest.MonkeyPatch, version: str, fit: Fit, why: str | None
) -> None:
    monkeypatch.setattr(device_attention, "flash_version", lambda: version)

    class Module:
        @staticmethod
        def varlen_attn_out(out: object, query: object, *, block_table: object = None) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", Module())  # type: ignore[arg-type]
    found = why_not_varlen(fit)
    assert (found is None) if why is None else (found is not None and why in found)


def test_a_pytorch_without_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        @staticmethod
        def varlen_attn_out(out: object, query: object) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", Old())  # type: ignore[arg-type]
    assert "no block tables" in str(why_not_varlen(USUAL))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)  # type: ignore[arg-type]
    assert "no block tables" in str(why_not_varlen(USUAL))


def test_what_flashinfer_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_attention, "find_spec", lambda name: None)
    assert why_not_flashinfer(USUAL) == "not installed"
    monkeypatch.setattr(device_attention, "find_spec", lambda name: name)
    assert why_not_flashinfer(USUAL) is None
    assert why_not_flashinfer(AMPERE) is None
    for other in (
        replace(USUAL, dtype=torch.float32),
        replace(USUAL, head_dim=80),
        replace(USUAL, sinks=True),
        replace(USUAL, capability=(7, 5)),
    ):
        assert why_not_flashinfer(other) is not None


def test_the_first_that_fits_is_taken_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = {name: object() for name in device_attention.NAMES}
    monkeypatch.setattr(device_attention, "find_spec", lambda name: name)
    monkeypatch.setattr(device_attention, "_logged", set())
    monkeypatch.setattr(device_attention.importlib, "import_module", lambda name: Made)

    class Made:
        VarlenAttention = made["varlen"]
        FlashInferAttention = made["flashinfer"]
        TritonAttention = made["triton"]

    monkeypatch.setitem(device_attention._WHY_NOT, "varlen", lambda fit: "too new")
    monkeypatch.setitem(
        device_attention._WHY_NOT,
        "flashinfer",
        lambda fit: None if fit.dtype is torch.bfloat16 else "too wide",
    )
    with caplog.at_level("INFO", "ballast"):
        for _ in range(2):
            assert choose(cache(torch.bfloat16)) is made["flashinfer"]
            assert choose(cache(torch.float32)) is made["triton"]
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2
    assert "flashinfer (varlen: too new)" in told[0]
    assert "triton (varlen: too new; flashinfer: too wide)" in told[1]
    assert choose(cache(torch.bfloat16), "triton") is made["triton"]
    with pytest.raises(ConfigError, match="too wide"):
        choose(cache(torch.float32), "flashinfer")
    with pytest.raises(ConfigError):
        choose(cache(torch.float32), "eager")


def test_without_triton_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_attention, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton"):
        choose(cache(torch.bfloat16))
