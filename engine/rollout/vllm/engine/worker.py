"""vLLM's CPU worker, with shared memory of a name that the ranks have agreed on.

Imports vLLM, so it is itself imported late, by name, by vLLM's executor.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from rolemesh.engine.rollout.vllm.engine.ranks import SHARED_MEMORY_NAME


class NamedCpuWorker(CPUWorker):  # type: ignore[misc]
    """Takes the name from the engine's `additional_config`."""

    def init_device(self) -> None:
        """Joins the other ranks."""
        # CPUWorker overwrites VLLM_DIST_IDENT with what follows the last colon of the init method
        # (vLLM 0.32). Torch's world exists already, so that the method has no other use.
        name = self.vllm_config.additional_config[SHARED_MEMORY_NAME]
        self.distributed_init_method = f"env://:{name}"
        super().init_device()
