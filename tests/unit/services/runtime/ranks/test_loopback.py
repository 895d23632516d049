"""Libraries of a service listen on loopback unless an interface is named."""

from __future__ import annotations

from rolemesh.services.runtime.ranks.loopback import stay_on_loopback


def test_what_is_not_set_is_loopback_and_torch_s_store_is_never_served() -> None:
    # Of a host whose name leads to 127.0.0.1, a list of listeners would not tell.
    variables = {"GLOO_SOCKET_IFNAME": "eth1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    stay_on_loopback(variables)
    assert variables == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    empty: dict[str, str] = {}
    stay_on_loopback(empty)
    assert empty["GLOO_SOCKET_IFNAME"] == "lo"
