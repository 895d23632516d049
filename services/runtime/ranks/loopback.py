"""Settings that keep what libraries listen on to this host.

Roles exchange nothing over process groups. Only a service on several hosts needs another interface
(`hosts/interfaces.py`), and weights that go by NCCL to another host, for which the user names it.
What still listens is named in docs/security.md.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_UNLESS_SET = {
    # Each process group of gloo listens on a port of its own, by default on the interface to which
    # the host's name leads.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
_ALWAYS = {
    # The elastic launcher otherwise serves a store of torch's on all interfaces, to anyone. Our
    # ranks meet through a file.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def stay_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Sets the variables that libraries read before they listen; an interface that is set stays."""
    environment.update(_ALWAYS)
    for name, value in _UNLESS_SET.items():
        environment.setdefault(name, value)
