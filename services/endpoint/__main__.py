"""Serves the policy of a model folder: python -m rolemesh.services.endpoint FOLDER."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.specs import EndpointSpec, VllmSpec
from rolemesh.services.endpoint.endpoint import Endpoint
from rolemesh.services.runtime.calls.compute import ComputeThread
from rolemesh.services.runtime.server.parent import follow_parent

logger = logging.getLogger("rolemesh.services.endpoint")

STOP_S = 30.0


def main() -> int:
    """Serves until a signal ends it; says where as one line of JSON on stdout."""
    arguments = _arguments()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        rollout = VllmSpec.model_validate_json(arguments.rollout)
        spec = EndpointSpec.model_validate_json(arguments.endpoint)
        asyncio.run(_serve(arguments, rollout, spec))
    except (ValidationError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rolemesh.services.endpoint", description=__doc__)
    parser.add_argument("folder", type=Path, help="Hugging Face model folder")
    parser.add_argument("--version", type=int, default=0, help="policy_version of its weights")
    parser.add_argument("--rollout", default="{}", help="keys of rollout, as JSON")
    parser.add_argument("--endpoint", default="{}", help="keys of endpoint, as JSON")
    parser.add_argument("--parent", type=int, default=None, help="process to end with")
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace, rollout: VllmSpec, spec: EndpointSpec) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if arguments.parent is not None:
        follow_parent(arguments.parent, STOP_S, lambda: None)
    compute = ComputeThread()

    def start() -> Endpoint:
        backend = make_backend(
            rollout, arguments.folder, folder_version=arguments.version, has_endpoint=True
        )
        return Endpoint(spec, backend, compute, bring_weights=lambda: None, may_sample=lambda: True)

    endpoint = await compute.run(start)
    print(json.dumps({"url": endpoint.url, "model": spec.model_name}), flush=True)
    await ended.wait()
    await compute.run(endpoint.close)
    compute.close(STOP_S)


if __name__ == "__main__":
    raise SystemExit(main())
