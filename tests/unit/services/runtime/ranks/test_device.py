"""A rank that is asked for a GPU and sees none: what it says of the cause."""

from __future__ import annotations

import os

import pytest
import torch
from support.fake_cuda import FakeCuda

from rolemesh.engine.hardware.devices import CUDNN_VARIABLE, be_deterministic
from rolemesh.rpc.errors import PreconditionError
from rolemesh.services.runtime.ranks.device import check_device, select_device


def told(monkeypatch: pytest.MonkeyPatch, version: str | None, found: str) -> str:
    """The refusal of a torch for that version of CUDA, which finds so much."""

    def init() -> None:
        if found:
            raise RuntimeError(found)

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    # Whatever it has is right for a run that asks for nothing.
    check_device("")
    with pytest.raises(PreconditionError) as caught:
        check_device("cuda")
    assert caught.value.reason == "DEVICE_MISSING"
    assert caught.value.message.endswith(
        "Give the service a GPU, or let the pool name the devices [cpu]"
    )
    return caught.value.message


def test_a_torch_for_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    message = told(monkeypatch, None, "")
    assert f"torch {torch.__version__} is built for the CPU (install rolemesh[gpu])" in message
    assert "CUDA_VISIBLE_DEVICES is not set" in message


def test_what_cuda_says_of_its_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    old = "The NVIDIA driver on your system is too old (found version 11040)."
    message = told(monkeypatch, "13.0", f"{old}\nException raised from ...")
    assert f"for CUDA 13.0 says: {old}; CUDA_VISIBLE_DEVICES is ''" in message
    assert "Exception raised" not in message
    assert "counts no GPU" in told(monkeypatch, "13.0", "")


def test_a_gpu_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_device("cuda")


@pytest.mark.parametrize("wanted", [True, False])
def test_a_gpu_computes_the_same_bits_where_a_run_asks_for_them(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("CUBLAS_WORKSPACE_CONFIG", "VLLM_BATCH_INVARIANT")
    for name in names:
        # So that it is put back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        # What a run before has asked of the process ends with it.
        torch.use_deterministic_algorithms(not wanted)
        be_deterministic(torch.device("cuda", 0), wanted)
        assert torch.are_deterministic_algorithms_enabled() is wanted
        assert [os.environ.get(name) for name in names] == (
            [":4096:8", "1"] if wanted else [None, None]
        )
        be_deterministic(torch.device("cuda", 0), False)
        assert not torch.are_deterministic_algorithms_enabled()
        assert [os.environ.get(name) for name in names] == [None, None]
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        be_deterministic(torch.device("cuda", 0), True)
        be_deterministic(torch.device("cuda", 0), False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "the user's own stays"
        be_deterministic(torch.device("cuda", 0), wanted)
        # A CPU is left as it is.
        be_deterministic(torch.device("cpu"), not wanted)
        assert torch.are_deterministic_algorithms_enabled() is wanted
    finally:
        be_deterministic(torch.device("cuda", 0), False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize(("variable", "is_on"), [(None, False), ("", False), ("1", True)])
def test_cudnns_attention_computes_where_it_is_asked_for(
    variable: str | None, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch, num_devices=1, rank=0)
    if variable is None:
        monkeypatch.delenv(CUDNN_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(CUDNN_VARIABLE, variable)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        select_device()
        assert torch.backends.cuda.cudnn_sdp_enabled() is is_on
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
