"""The switch between Triton's kernels and their references."""

from __future__ import annotations

import pytest
import torch

from rolemesh.engine.kernels import choice
from rolemesh.engine.kernels.choice import (
    KERNELS_VARIABLE,
    device_of_columns,
    triton_serves,
    unserved,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_triton_is_there", lambda: True)
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("has_triton")
@pytest.mark.parametrize("value", [None, "", "torch"])
def test_references_compute_unless_kernels_are_asked_for(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(KERNELS_VARIABLE, value)
    assert not triton_serves(CUDA)
    assert not triton_serves(CPU)
    assert unserved(CPU) == ""


@pytest.mark.usefixtures("has_triton")
def test_kernels_compute_on_a_gpu_and_on_a_cpu_by_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    assert triton_serves(CUDA)
    assert unserved(CUDA) == ""
    # Ranks with a GPU have columns in host memory, too.
    assert not triton_serves(CPU)
    # A rank without one has no kernels at all, which it says.
    assert "this rank computes on the cpu, where the kernels do not serve" in unserved(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_serves(CPU)


@pytest.mark.parametrize(
    ("value", "message"),
    [("cuda", "'cuda': give torch or triton"), ("triton", "not installed: install it")],
)
def test_a_choice_that_cannot_be_met_is_refused(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_triton_is_there", lambda: False)
    monkeypatch.setenv(KERNELS_VARIABLE, value)
    with pytest.raises(ValueError, match=message):
        triton_serves(CPU)


@pytest.mark.usefixtures("has_triton")
def test_columns_go_to_a_gpu_that_is_in_use_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    assert device_of_columns() == CPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device_of_columns() == CUDA
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    assert device_of_columns() == CPU
