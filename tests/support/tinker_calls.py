"""What becomes of each public method of Tinker's SDK: which test calls it, or why none is served.

A test with the SDK holds this to its classes, and one without it the page on Tinker's clients.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "0.38.0"

CALLED: Mapping[str, Mapping[str, str]] = {
    "training supervised": {
        "ServiceClient": "create_lora_training_client get_server_capabilities",
        "TrainingClient": "forward_backward optim_step get_info get_tokenizer get_console_url "
        "get_telemetry",
        "APIFuture": "result",
    },
    "training losses": {"TrainingClient": "forward"},
    "training resumed": {
        "ServiceClient": "create_training_client_from_state "
        "create_training_client_from_state_with_optimizer",
        "TrainingClient": "save_state load_state load_state_with_optimizer",
    },
    "training asynchronous": {
        "ServiceClient": "create_lora_training_client_async get_server_capabilities_async "
        "create_training_client_from_state_async "
        "create_training_client_from_state_with_optimizer_async",
        "TrainingClient": "forward_async forward_backward_async optim_step_async save_state_async "
        "load_state_async load_state_with_optimizer_async get_info_async",
    },
    "training custom": {
        "ServiceClient": "create_custom_loss",
        "TrainingClient": "forward_backward_custom forward_backward_custom_async",
    },
    "sampling samples": {
        "ServiceClient": "create_sampling_client",
        "TrainingClient": "create_sampling_client save_weights_for_sampler "
        "save_weights_and_get_sampling_client",
        "SamplingClient": "sample",
    },
    "sampling scores": {"SamplingClient": "compute_logprobs"},
    "sampling handles": {
        "SamplingClient": "create from_sampler_handle get_base_model get_sampler_handle "
        "get_telemetry get_tokenizer",
    },
    "sampling asynchronous": {
        "ServiceClient": "create_sampling_client_async",
        "TrainingClient": "create_sampling_client_async save_weights_for_sampler_async "
        "save_weights_and_get_sampling_client_async",
        "SamplingClient": "sample_async compute_logprobs_async get_base_model_async",
        "APIFuture": "coroutine future result_async",
    },
    "weights lists": {
        "ServiceClient": "create_rest_client get_console_url get_telemetry",
        "RestClient": "delete_checkpoint delete_checkpoint_from_tinker_path get_sampler "
        "get_server_capabilities get_telemetry get_training_run get_training_run_by_tinker_path "
        "get_weights_info_by_tinker_path list_checkpoints list_training_runs list_user_checkpoints "
        "publish_checkpoint_from_tinker_path set_checkpoint_ttl_from_tinker_path "
        "unpublish_checkpoint_from_tinker_path",
    },
    "weights asynchronous": {
        "RestClient": "delete_checkpoint_async delete_checkpoint_from_tinker_path_async "
        "get_sampler_async get_training_run_async get_training_run_by_tinker_path_async "
        "list_checkpoints_async list_training_runs_async list_user_checkpoints_async "
        "publish_checkpoint_from_tinker_path_async set_checkpoint_ttl_from_tinker_path_async "
        "unpublish_checkpoint_from_tinker_path_async",
    },
    "weights sessions": {
        "ServiceClient": "copy_weights",
        "TrainingClient": "save_weights_external",
        "RestClient": "assign_session_project copy_weights get_external_weights_urls get_session "
        "list_sessions search_sessions",
    },
    "weights sessions_asynchronous": {
        "TrainingClient": "save_weights_external_async",
        "RestClient": "assign_session_project_async copy_weights_async "
        "get_external_weights_urls_async get_session_async list_sessions_async",
    },
    "refusals places": {"ServiceClient": "close"},
    "refusals unserved": {"AdminClient": "get_telemetry"},
}
"""Methods by the program that calls them, and what of it: `tinker_PROGRAM.py WHAT`."""

BY_THE_SDK: Mapping[str, str] = {
    "SamplingClient.on_queue_state_change": "the SDK calls it while a sample waits",
}
"""Methods that programs have no use for."""

_NO_BILLS = "there are no bills and no accounts"

UNSERVED: Mapping[str, str] = {
    "RestClient.export_session_trace": "no timeline is recorded",
    "RestClient.get_audit_log": _NO_BILLS,
    "RestClient.get_billing_usage": _NO_BILLS,
    "RestClient.get_current_checkpoint_storage_usage": _NO_BILLS,
    "RestClient.whoami": "it needs a sign-in, and the SDK refuses it with a key",
    "AdminClient.get_audit_log": _NO_BILLS,
    "AdminClient.get_billing_usage": _NO_BILLS,
    "AdminClient.get_current_checkpoint_storage_usage": _NO_BILLS,
}
"""Methods that fail, each with the reason; and so do those that end in _async."""


def called_by(what: str) -> set[str]:
    """The methods that a program has to call."""
    return {f"{kind}.{name}" for kind, names in CALLED[what].items() for name in names.split()}


def named() -> set[str]:
    """All methods of which something is said, without the _async of those that are not served."""
    return {*(name for what in CALLED for name in called_by(what)), *BY_THE_SDK, *UNSERVED}


def is_unserved(name: str) -> bool:
    """Whether a method fails, by itself or by its twin without _async."""
    return name.removesuffix("_async") in UNSERVED


def table() -> str:
    """The page's table: a class a row, twins that end in _async left out."""
    lines = ["| class | served | not served |", "|---|---|---|"]
    names = sorted({name.removesuffix("_async") for name in named()} - set(BY_THE_SDK))
    for kind in dict.fromkeys(name.partition(".")[0] for name in names):
        mine = [name for name in names if name.startswith(f"{kind}.")]
        served, failing = (
            ", ".join(f"`{name.partition('.')[2]}`" for name in mine if is_unserved(name) is fails)
            for fails in (False, True)
        )
        lines.append(f"| `{kind}` | {served} | {failing} |")
    return "\n".join(lines) + "\n"
