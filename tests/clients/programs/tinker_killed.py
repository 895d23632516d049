"""A loop by Tinker's SDK whose actor is killed: tinker_killed.py FOLDER [PLACE...].

It prints as JSON what it sampled and the SHA-256 of the adapter that it ends with. FOLDER is that
of the server's files; the actor is killed with SIGKILL at each PLACE: `sample` or `gradient`, after
the call was sent and before its result is fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from tinker_recorder import base_of, prompt, recorded, weighed

STEPS, KILLED_STEP = 4, 2
BEGINS = ([5, 6, 7, 8], [9, 10, 11])
RATE = types.AdamParams(learning_rate=1e-2)


def trained(service: Any, folder: str, places: list[str]) -> dict[str, Any]:
    """Rewards even tokens."""
    actors = {_actor(folder)}

    def at(place: str, step: int) -> None:
        if step == KILLED_STEP and place in places:
            actors.add(_actor(folder))
            os.kill(_actor(folder), signal.SIGKILL)

    client = service.create_lora_training_client(base_model=base_of(service), rank=4, seed=1)
    samples = []
    for step in range(STEPS):
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=12, seed=7)
        futures = [sampler.sample(prompt(begin), 4, params) for begin in BEGINS]
        at("sample", step)
        groups = [future.result().sequences for future in futures]
        samples += [list(one.tokens) for group in groups for one in group]
        data = [
            weighed(begin, one, sum(token % 2 == 0 for token in one.tokens) / 12 - 0.5)
            for begin, group in zip(BEGINS, groups, strict=True)
            for one in group
        ]
        # Two gradients of one step: the first one is there when the actor is killed.
        client.forward_backward(data[:4], "importance_sampling").result()
        second = client.forward_backward(data[4:], "importance_sampling")
        at("gradient", step)
        second.result()
        client.optim_step(RATE).result()
    external = client.save_weights_external(f"end-{len(places)}").result().path
    urls = service.create_rest_client().get_external_weights_urls(external).result().urls
    weights = urllib.request.urlopen(urls["adapter_model.safetensors"]).read()
    actors.add(_actor(folder))
    return {
        "samples": samples,
        "adapter": hashlib.sha256(weights).hexdigest(),
        "num_actors": len(actors),
    }


def _actor(folder: str) -> int:
    """The actor's process."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rolemesh.services.actor" in words and f"--folder={folder}".encode() in words:
            found.append(int(place.parent.name))
    # It may have processes of its own that are called the same: the first one is theirs all.
    return min(found)


if __name__ == "__main__":
    with tinker.ServiceClient() as client, recorded() as called:
        saw = trained(client, sys.argv[1], sys.argv[2:])
    print(json.dumps({**saw, "called": sorted(called)}))
