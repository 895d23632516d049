"""The environment that a child of the coordinator gets: what it needs, and nothing secret.

A list of what may pass, not of what may not. A shell holds tokens of which rolemesh knows nothing
(AWS_SECRET_ACCESS_KEY, OPENAI_API_KEY), services run functions of users and can be asked over the
network, and a list of secrets is always one short. What the list lacks fails loudly, and a recipe
names it: `services.<role>.variables`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rolemesh.engine.specs.variables import OWN_SECRETS

_NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("VIRTUAL_ENV", "CC", "CXX", "CPATH", "LIBRARY_PATH", "GLIBC_TUNABLES", "DO_NOT_TRACK"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        # Traces take a proxy, and so may tools of an environment.
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "grpc_proxy", "no_grpc_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    )
)
_PREFIXES = (
    *("LC_", "LD_", "XDG_", "PYTHON", "CONDA_", "SSL_CERT_", "MALLOC_"),
    # Devices and what connects them.
    *("CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "FI_", "IBV_", "HIP_", "HSA_", "ROCR_"),
    # Threads.
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_"),
    # Which instructions of the CPU the products of torch may use.
    *("ATEN_", "ONEDNN_", "DNNL_"),
    # Libraries of the services.
    *("TORCH", "PYTORCH_", "TRITON_", "VLLM_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("GRPC_", "OTEL_", "ROLEMESH_"),
)
_WITHHELD = frozenset(("HF_ENDPOINT",))
"""A hub of one's own, whose URL may have a password; services fetch nothing from one."""
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)S?$", re.IGNORECASE)
"""Ends of names that do not pass, whatever they begin with, e.g. HF_TOKEN and VLLM_API_KEY."""


def child_environment(environment: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this process that a child may have.

    Args:
        environment: Of this process.
        named: Further names, which the recipe gives.
    """
    names = set(named)
    return {
        name: value
        for name, value in environment.items()
        if name in names or (_passes(name) and not _is_of_recipe(name))
    }


def without_own_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """All variables but those that hold secrets of the coordinator, for what its user runs."""
    return {name: value for name, value in environment.items() if name not in OWN_SECRETS}


def _passes(name: str) -> bool:
    is_secret = name in _WITHHELD or _SECRET.search(name)
    return (name in _NAMES or name.startswith(_PREFIXES)) and not is_secret


def _is_of_recipe(name: str) -> bool:
    """Whether it sets a field of a recipe, which may be a URL with a password."""
    is_ours = name.startswith("ROLEMESH_") and "__" in name
    return is_ours and not name.startswith("ROLEMESH_SERVICE__")
