"""A resources server of NeMo-Gym: an account for each session, a tool and a verifier.

It is written as NeMo-Gym's own examples are, and `gym env start` starts it.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel, Field


class Deposit(BaseModel):
    amount: int


class Balance(BaseModel):
    balance: int


class SeedRequest(BaseSeedSessionRequest):
    start: int = 0


class VerifyRequest(BaseVerifyRequest):
    """The row's own fields stand beside those of each request."""

    deposits: int
    """Times that the tool shall be called."""
    start: int = 0
    judge: Literal["sits", "raises", "gives up"] = "sits"


class VerifyResponse(VerifyRequest):
    reward: float
    reward_components: dict[str, float]


class Bank(SimpleResourcesServer):
    """The cookie of a session says whose account it is."""

    config: BaseResourcesServerConfig
    balances: dict[str, int] = Field(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/deposit")(self.deposit)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> BaseSeedSessionResponse:
        self.balances[request.session[SESSION_ID_KEY]] = body.start
        return BaseSeedSessionResponse()

    async def deposit(self, request: Request, body: Deposit) -> Balance:
        session = request.session[SESSION_ID_KEY]
        self.balances[session] += body.amount
        return Balance(balance=self.balances[session])

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Rewards the right number of deposits, an account of the session, and its balance said."""
        if body.judge == "raises":
            raise RuntimeError("the judge does not answer")
        if body.judge == "gives up":
            # What releases after this one answer for a judge of theirs.
            failed = {"reward": 0.0, "_ng_failure_class": "judge_failed"}
            return JSONResponse({**body.model_dump(), **failed})  # type: ignore[return-value]
        kinds = [item.type for item in body.response.output]
        balance = self.balances.get(request.session[SESSION_ID_KEY])
        components: dict[str, Any] = {
            "paid": kinds.count("function_call_output") == body.deposits,
            "kept": balance is not None and (balance > body.start) == (body.deposits > 0),
            "said": balance is not None and str(balance) in body.response.output_text.split(),
        }
        return VerifyResponse(
            **body.model_dump(), reward=sum(components.values()), reward_components=components
        )


if __name__ == "__main__":
    Bank.run_webserver()
