"""The wire's hand-written half is light: the coordinator imports it."""

from __future__ import annotations

import subprocess
import sys


def test_rpc_imports_no_torch() -> None:
    program = (
        "import sys; import rolemesh.rpc.channel, rolemesh.rpc.errors, rolemesh.rpc.policy; "
        "import rolemesh.rpc.experience.payload, rolemesh.rpc.experience.pull; "
        "import rolemesh.rpc.experience.references; "
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules); "
        "print(sorted(heavy))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"
