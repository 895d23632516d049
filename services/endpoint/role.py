"""A role whose sampler answers at an endpoint, where its recipe wants that."""

from __future__ import annotations

import logging

from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.sessions.runner import SessionRunner
from rolemesh.engine.specs import AgentSpec, EndpointSpec, EnvironmentSpec
from rolemesh.services.endpoint.endpoint import Endpoint
from rolemesh.services.runtime.calls.runtime import Runtime
from rolemesh.services.runtime.servicers.rollout import SamplingRole

logger = logging.getLogger(__name__)


class EndpointRole(SamplingRole):
    """What actor and rollout role share of an endpoint, from Initialize to the end of the run."""

    endpoint: Endpoint | None = None
    """Where programs ask the policy; None: nowhere."""
    runtime: Runtime | None = None
    """Of the run that the role serves; set when it registers."""

    def open_endpoint(
        self, spec: EndpointSpec | None, environment: EnvironmentSpec | None, sandbox: Sandbox
    ) -> dict[str, str]:
        """Serves the sampler at an endpoint from now on, where there is to be one.

        Args:
            spec: Of the endpoint; None: there is none.
            environment: Of the rows; an agent asks at the endpoint.
            sandbox: Where a user's code runs.

        Returns:
            Where it answers, as a fact of Initialize.

        Raises:
            ValueError: The port cannot be bound, or a field cannot be served.
            UserCodeError: The code of an agent cannot be loaded.
        """
        if spec is None:
            return {}
        if self.runtime is None:
            raise RuntimeError("an endpoint is opened before the role was registered")
        hold = self.runtime.hold
        self.endpoint = Endpoint(
            spec,
            self.backend,
            self.runtime.process.compute,
            bring_weights=self.bring_weights,
            may_sample=lambda: hold.part is not None and not hold.is_asleep,
        )
        if isinstance(environment, AgentSpec):
            self.source.agents = SessionRunner(environment, sandbox, self.endpoint)
            logger.info("agents run in the sandbox %s", sandbox)
        return {"endpoint": self.endpoint.url}

    def close_endpoint(self) -> None:
        """Ends the endpoint with all its calls; nothing where there is none."""
        if self.endpoint is not None:
            self.endpoint.close()
            if self.source.agents is not None:
                self.source.agents.close()
                self.source.agents = None
            self.endpoint = None
