"""Asks a service for its health: python health_check.py HOST:PORT [NAME].

Ends with 0 when the service answers SERVING, with 1 and a reason on standard error otherwise.
NAME is the health entry, e.g. "liveness" or "readiness"; none means the service as a whole.
Where ROLEMESH_SERVICE__IDENTITY names the service's identity, the check shows it, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rolemesh.rpc.members.identity import CHANNEL_OPTIONS, Identity, IdentityError

DEADLINE_S = 5.0
"""Below the time-out of the container's health check, so that the reason gets out."""


def check(address: str, name: str = "") -> str | None:
    """What is wrong with the service, or None when it serves."""
    place = os.environ.get("ROLEMESH_SERVICE__IDENTITY")
    try:
        identity = None if place is None else Identity.read(Path(place))
    except IdentityError as error:
        return str(error)
    with (
        grpc.insecure_channel(address)
        if identity is None
        else grpc.secure_channel(address, identity.channel_credentials(), CHANNEL_OPTIONS)
    ) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return f"{address}: {name or 'service'} is {status}"
    return None


def main(arguments: list[str]) -> int:
    """Runs the check; returns the exit status."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    problem = check(*arguments)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
