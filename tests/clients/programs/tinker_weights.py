"""Saved weights with Tinker's SDK: tinker_weights.py WHAT prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
import warnings
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types
from tinker_recorder import base_of, recorded


def lists(service: Any) -> dict[str, Any]:
    """Lists, lives, publication and removal of saved weights."""
    rest = service.create_rest_client()
    _, run, paths = _saved(service)
    state, sampler = paths
    seen = {
        "run": run,
        "paths": paths,
        "base": base_of(service),
        "telemetry": [rest.get_telemetry() is None, service.get_telemetry() is None],
        "console": service.get_console_url(),
        "models": [
            one.model_name for one in rest.get_server_capabilities().result().supported_models
        ],
        "listed": [_told(one) for one in rest.list_checkpoints(run).result().checkpoints],
        "of_user": [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints],
        "one": [
            one.tinker_path
            for one in rest.list_user_checkpoints(limit=1, offset=1).result().checkpoints
        ],
        "runs": [one.training_run_id for one in rest.list_training_runs().result().training_runs],
        "count": rest.list_training_runs(limit=1).result().cursor.total_count,
        "sampler": rest.get_sampler(f"{run.partition(':')[0]}:sample:0").result().base_model,
    }
    info = rest.get_weights_info_by_tinker_path(state).result()
    seen["info"] = [info.base_model, info.is_lora, info.lora_rank]
    for found in (
        rest.get_training_run(run).result(),
        rest.get_training_run_by_tinker_path(sampler).result(),
    ):
        seen.setdefault("found", []).append(
            [found.training_run_id, found.lora_rank, found.last_checkpoint.tinker_path]
        )
        seen["metadata"] = found.user_metadata
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    rest.publish_checkpoint_from_tinker_path(state).result()
    seen["public"] = [_told(one) for one in rest.list_checkpoints(run).result().checkpoints]
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    seen["private"] = [_told(one) for one in rest.list_checkpoints(run).result().checkpoints]
    rest.delete_checkpoint(run, "weights/state").result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    seen["left"] = [_told(one) for one in rest.list_checkpoints(run).result().checkpoints]
    return seen


def sessions(service: Any) -> dict[str, Any]:
    """Sessions by what is known of them, copies of weights, and files for other programs."""
    rest = service.create_rest_client()
    client, run, (state, _) = _saved(service)
    session = run.partition(":")[0]
    told = rest.get_session(session).result()
    rest.assign_session_project(session, "a-project").result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = types.SessionSearchRequest(project_ids=["a-project"])
        found = rest.search_sessions(asked).result().sessions
    external = client.save_weights_external("files").result().path
    urls = rest.get_external_weights_urls(external).result().urls
    files = {name: urllib.request.urlopen(url).read() for name, url in urls.items()}
    archive = tinker.ServiceClient(project_id="archive")
    copies = [
        rest.copy_weights(state, "archive").result(),
        archive.copy_weights(external).result(),
    ]
    archive.close("success").result()
    return {
        "run": run,
        "session": session,
        "told": [told.training_run_ids, told.sampler_ids, told.user_metadata],
        "listed": rest.list_sessions(limit=1000).result().sessions,
        "found": [[one.session_id, one.project_id, one.status.type] for one in found],
        "external": external,
        "files": {name: len(content) for name, content in files.items()},
        "config": json.loads(files["adapter_config.json"]),
        "loaded": [
            service.create_training_client_from_state(one).get_info().lora_rank for one in copies
        ],
    }


def sessions_asynchronous(service: Any) -> dict[str, Any]:
    """The same for programs with an event loop."""
    return asyncio.run(_sessions_asynchronous(service))


async def _sessions_asynchronous(service: Any) -> dict[str, Any]:
    rest = service.create_rest_client()
    client, run, (state, _) = await asyncio.to_thread(_saved, service)
    session = run.partition(":")[0]
    await rest.assign_session_project_async(session, "another")
    # It gives a promise, as the call without _async does.
    saved = await client.save_weights_external_async("files")
    external = (await saved).path
    return {
        "run": run,
        "session": session,
        "told": (await rest.get_session_async(session)).training_run_ids,
        "listed": (await rest.list_sessions_async(limit=1000)).sessions,
        "external": external,
        "files": sorted((await rest.get_external_weights_urls_async(external)).urls),
        "copied": await rest.copy_weights_async(state, "archive"),
    }


def asynchronous(service: Any) -> dict[str, Any]:
    """All that there is for programs with an event loop."""
    return asyncio.run(_asynchronous(service))


async def _asynchronous(service: Any) -> dict[str, Any]:
    rest = service.create_rest_client()
    # In a thread: these calls wait.
    _, run, (state, sampler) = await asyncio.to_thread(_saved, service)
    runs = (await rest.list_training_runs_async()).training_runs
    seen = {
        "run": run,
        "paths": [state, sampler],
        "listed": [_told(one) for one in (await rest.list_checkpoints_async(run)).checkpoints],
        "of_user": [
            one.tinker_path for one in (await rest.list_user_checkpoints_async()).checkpoints
        ],
        "runs": [one.training_run_id for one in runs],
        "found": [
            (await rest.get_training_run_async(run)).training_run_id,
            (await rest.get_training_run_by_tinker_path_async(state)).training_run_id,
        ],
        "sampler": (await rest.get_sampler_async(f"{run.partition(':')[0]}:sample:0")).base_model,
    }
    await rest.set_checkpoint_ttl_from_tinker_path_async(state, 3600)
    await rest.publish_checkpoint_from_tinker_path_async(state)
    public = (await rest.list_checkpoints_async(run)).checkpoints
    await rest.unpublish_checkpoint_from_tinker_path_async(state)
    await rest.delete_checkpoint_async(run, "weights/state")
    await rest.delete_checkpoint_from_tinker_path_async(sampler)
    left = (await rest.list_checkpoints_async(run)).checkpoints
    return {**seen, "public": [_told(one) for one in public], "left": [_told(one) for one in left]}


def keys(service: Any) -> dict[str, Any]:
    """Whether the weights that another owner has published, and those kept, can be had."""
    public, private = sys.argv[2:]
    seen = {}
    for name, path in (("public", public), ("private", private)):
        try:
            client = service.create_training_client_from_state(path)
            seen[name] = client.get_info().lora_rank
        except tinker.APIStatusError as error:
            seen[name] = error.status_code
    return seen


def publish(service: Any) -> dict[str, Any]:
    """Two states, of which one is public."""
    rest = service.create_rest_client()
    client, _, (state, _) = _saved(service)
    rest.publish_checkpoint_from_tinker_path(state).result()
    return {"public": state, "private": client.save_state("other").result().path}


def _saved(service: Any) -> tuple[Any, str, list[str]]:
    client = service.create_lora_training_client(
        base_model=base_of(service), rank=4, seed=1, user_metadata={"of": "a test"}
    )
    # The session's first sampler.
    client.save_weights_and_get_sampling_client()
    state = client.save_state("state").result().path
    sampler = client.save_weights_for_sampler("sampler", ttl_seconds=600).result().path
    return client, state.removeprefix("tinker://").partition("/")[0], [state, sampler]


def _told(one: Any) -> list[Any]:
    return [
        one.checkpoint_id,
        one.checkpoint_type,
        one.public,
        one.expires_at is not None,
        (one.size_bytes or 0) > 0,
    ]


WHATS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lists": lists,
    "sessions": sessions,
    "sessions_asynchronous": sessions_asynchronous,
    "asynchronous": asynchronous,
    "publish": publish,
    "keys": keys,
}

if __name__ == "__main__":
    with tinker.ServiceClient() as client, recorded() as called:
        saw = WHATS[sys.argv[1]](client)
    print(json.dumps({**saw, "called": sorted(called)}))
