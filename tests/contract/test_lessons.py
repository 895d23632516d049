"""Lessons of known holes in systems like this one: each with the tests that prove it learned.

A test stands here by file and name; that those exist, and run without GPU, containers or minutes,
is checked below. Parameters of a test stand for further ways of the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.named_tests import TESTS, collected

LATER = {"slow", "gpu", "containers", "skip", "skipif", "xfail"}
"""Marks of tests that `make test` does not run, or whose failure it does not tell."""


@dataclass(frozen=True)
class Lesson:
    """A rule, what taught it, and the tests that fail where it is broken."""

    rule: str
    taught_by: str
    tests: str
    """Files, each with the names in it, without "test_"."""

    def named(self) -> list[tuple[str, str]]:
        """File below tests/ and name of each test."""
        file, found = "", []
        for word in self.tests.split():
            if word.endswith(":"):
                file = word.removesuffix(":")
            else:
                found.append((file, f"test_{word}"))
        return found


LESSONS = (
    Lesson(
        "Nothing from outside of a process is unpickled, evaluated or run, nor a handle followed",
        "vLLM CVE-2024-11041, CVE-2024-9053, CVE-2025-29783, CVE-2025-32444, CVE-2025-47277, "
        "CVE-2026-115912 (a forged handle of shared memory); Llama CVE-2024-50050; SGLang "
        "CVE-2025-10164, CVE-2026-3059, CVE-2026-3060, CVE-2026-3989, CVE-2026-86793 (weights); "
        "LMDeploy CVE-2026-119706, CVE-2026-76850; LightLLM CVE-2026-26220, CVE-2026-96560, "
        "CVE-2026-90919",
        """
        integration/test_audited_services.py: services_run_and_unpickle_nothing_that_arrives
        contract/test_source_rules.py: code_that_runs_what_arrives_does_not_pass_lint
            no_file_of_ours_is_let_off_these_rules
        integration/test_strangers.py:
            a_stranger_runs_no_command_on_the_host_of_a_reward
            a_stranger_runs_no_code_through_a_scorer_of_the_library
        unit/engine/test_grants.py: no_module_is_granted_that_lies_in_no_root
            no_way_out_of_a_root_is_granted
        contract/test_experience_wire.py:
            a_shared_memory_name_of_another_form_is_never_opened
            a_segment_of_another_size_is_refused
        unit/services/runtime/experience/test_published_weights.py:
            segments_that_do_not_hold_the_boxes_are_refused
            shared_memory_that_was_not_offered_is_refused
        unit/engine/transport/test_shm.py: a_link_is_not_followed
            only_the_user_may_open_the_file a_size_that_does_not_fit_is_refused
        unit/services/reward/outside/test_answers.py: foreign_bytes_are_no_answers
        unit/coordinator/recipe/test_hostile_recipes.py: what_no_recipe_needs_is_refused_in_words
        """,
    ),
    Lesson(
        "Checkpoints and models are data: safetensors and JSON whose hashes are checked",
        "torch CVE-2025-32434 (weights_only), CVE-2026-24747, CVE-2024-48063, CVE-2023-4808; "
        "transformers CVE-2026-1839 (rng_state.pth); Lightning CVE-2026-31221",
        """
        numerics/test_checkpoint.py:
            pickles_in_the_folder_of_a_checkpoint_are_never_opened
            a_damaged_file_is_named_and_changes_no_weight
        unit/engine/models/test_hostile_folders.py: weights_that_are_pickles_are_refused
            code_and_pickles_beside_a_known_model_are_left_alone
        numerics/test_cuts.py:
            a_cut_whose_random_state_is_damaged_is_refused_before_anything_changes
        """,
    ),
    Lesson(
        "What a model writes is never evaluated; reward code has a process and limits of its own",
        "verl CVE-2026-6878",
        """
        unit/engine/test_hostile_completions.py: nothing_that_a_policy_writes_is_run
        unit/engine/environments/test_arithmetic.py: everything_else_is_refused
        unit/engine/test_reasoning_tasks.py: no_completion_is_executed_by_a_scorer
            no_row_is_executed_by_a_scorer
        integration/test_reward_functions.py: processor_time_is_bounded
            a_function_that_goes_wrong_fails_its_rows_alone
            processes_that_a_function_started_end_with_its_worker
            secrets_of_the_service_stay_there
        integration/test_outside_http_rewards.py: what_a_completion_has_in_braces_is_not_filled_in
        """,
    ),
    Lesson(
        "Loopback by default; elsewhere certificates, a token, and rights for each method",
        "Ray CVE-2023-48022, CVE-2023-6019, CVE-2026-27482; vLLM CVE-2025-30202; OpenRLHF#1317",
        """
        unit/services/runtime/server/test_config.py: a_host_that_others_reach_needs_consent
        integration/test_listeners.py: a_service_of_two_ranks_listens_on_loopback_alone
        integration/test_mesh_identity.py: strangers_do_not_get_in
            a_connection_without_a_certificate_of_its_own_does_not_get_in
            a_member_may_not_call_what_is_for_others a_client_cannot_stand_in_for_a_server
        unit/rpc/test_policy.py: members_may_call_what_they_need_and_nothing_else
            services_may_register_at_the_coordinator_and_do_nothing_else_there
            a_method_that_names_no_caller_has_no_policy
        unit/coordinator/api/test_credentials.py:
            every_call_of_the_coordinator_needs_the_token
            no_door_is_opened_to_others_without_a_token
        integration/test_http_server.py: without_a_token_it_is_served_on_loopback_alone
        """,
    ),
    Lesson(
        "Host and Origin are checked on every route and method, and no other origin may read",
        "Ray CVE-2025-62593 (a name that is bound anew)",
        """
        unit/coordinator/api/http/test_guard.py: a_name_rebound_to_loopback_is_refused
            a_rebound_name_reaches_no_route_by_any_method
            a_page_of_another_origin_changes_nothing
            a_page_of_another_origin_reaches_no_route_that_changes_something
            no_page_of_another_origin_may_read_an_answer
        """,
    ),
    Lesson(
        "Rewards are finite, as many as rows, and answers to the call that asked for them",
        "OpenRLHF#1317, CVE-2026-6878",
        """
        integration/test_grpc_rewards.py: a_lying_server_is_not_believed_and_not_asked_again
        integration/test_outside_http_faults.py:
            a_lie_fails_its_rows_and_is_not_asked_for_again
            a_number_that_float32_does_not_hold_fails_its_row
        unit/engine/test_rewards.py: a_reward_that_is_not_finite_names_the_row
            a_reward_of_the_wrong_length_is_refused
        unit/services/reward/functions/test_answers.py: what_is_no_list_of_numbers_is_refused_by_row
        unit/engine/sandbox/test_frames.py: nan_is_not_sent
        unit/services/reward/outside/test_answers.py:
            only_the_same_request_of_the_same_call_takes_an_answer
            a_record_that_does_not_fit_its_request_is_not_taken
        integration/test_reward_functions.py:
            a_worker_that_writes_garbage_is_not_believed
            a_reward_that_answers_no_call_is_not_taken_for_the_next_one
        """,
    ),
    Lesson(
        "A tensor is a type, a shape and bytes that fit both; nothing else is a tensor",
        "vLLM CVE-2025-62164, CVE-2026-56340, CVE-2026-73557",
        """
        unit/engine/layout/test_payload.py:
            bytes_that_do_not_fit_their_shape_are_refused
            a_column_that_contradicts_itself_is_refused
            an_element_type_that_may_not_travel_is_refused_by_column
            counts_below_what_there_must_be_are_refused
        contract/test_columns.py: a_header_that_does_not_fit_its_bytes_is_refused
            offsets_that_decrease_are_refused
        contract/test_experience_wire.py: an_answer_that_does_not_fit_is_refused_and_its_peer_named
        contract/test_put.py: a_payload_that_does_not_fit_its_header_is_refused
        unit/services/runtime/experience/test_published_weights.py:
            answers_that_do_not_fit_are_refused
        contract/test_transports.py: a_message_of_another_size_is_an_error_and_not_data
        """,
    ),
    Lesson(
        "Everything that a message can size has a limit, checked before anything is made of it",
        "vLLM CVE-2026-73559, CVE-2026-105757, CVE-2026-105754; protobuf CVE-2025-4565, "
        "CVE-2026-0994",
        """
        unit/rpc/test_limits.py: every_field_of_a_request_that_sizes_memory_has_a_limit
            a_reference_of_ten_bytes_is_refused_before_rows_are_counted
            millions_of_empty_messages_are_refused_before_they_are_made
            structs_nest_no_deeper_than_a_parser_can_follow
            json_that_nests_too_deep_is_refused_before_it_is_parsed
        unit/rpc/test_channel.py: no_option_raises_the_message_caps
        integration/test_hostile_calls.py: one_row_is_not_fetched_many_times
            more_operations_than_a_service_works_on_are_refused_as_load
            a_put_that_pauses_gives_its_room_back
        unit/coordinator/api/http/test_guard.py: a_body_beyond_the_bound_is_refused
            a_body_that_nests_too_deep_is_refused_by_name
        unit/coordinator/recipe/test_hostile_recipes.py: aliases_count_as_all_that_they_stand_for
        integration/test_fuzz.py: a_few_malformed_requests_do_no_harm_to_a_role
            a_few_malformed_requests_do_no_harm_to_a_coordinator
        """,
    ),
    Lesson(
        "No code of a model's folder is trusted, nothing is downloaded, no check is an assertion",
        "vLLM CVE-2026-22807, CVE-2026-27893, CVE-2026-41523, CVE-2026-47155, CVE-2026-114053",
        """
        unit/engine/models/test_hostile_folders.py:
            a_model_that_only_its_own_code_could_make_is_refused
            code_and_pickles_beside_a_known_model_are_left_alone
        numerics/test_rollout_vllm.py: code_and_pickles_in_the_folder_are_left_alone
        contract/test_source_rules.py:
            every_model_and_tokenizer_is_made_without_the_code_of_its_folder
            nothing_of_ours_trusts_remote_code no_assertion_checks_what_arrives
        """,
    ),
    Lesson(
        "Paths stay in granted folders, links are not followed, secrets are not told nor guessed",
        "general",
        """
        integration/test_strangers.py: models_and_data_are_read_in_granted_folders_alone
            state_is_written_and_read_in_granted_folders_alone
        unit/engine/test_grants.py: a_path_is_granted_in_a_folder_alone
        numerics/test_checkpoint.py: a_manifest_names_no_file_outside_of_its_folder
            an_export_replaces_nothing_but_an_export
        unit/engine/transport/test_shm.py: a_link_is_not_followed
        integration/test_secrets.py: planted_secrets_are_nowhere_but_where_they_are_needed
        unit/coordinator/api/test_credentials.py: a_token_is_compared_in_constant_time
            what_cannot_be_a_token_is_refused_and_not_shown
        """,
    ),
    Lesson(
        "NCCL, gloo and torch's store know no callers: on loopback by default, and said so",
        "vLLM CVE-2025-47277",
        """
        unit/services/runtime/ranks/test_loopback.py:
            what_is_not_set_is_loopback_and_torch_s_store_is_never_served
        integration/test_listeners.py: a_service_of_two_ranks_listens_on_loopback_alone
        contract/test_lessons.py: the_page_says_what_travels_in_clear
        """,
    ),
)  # fmt: skip


NAMED = sorted({named for lesson in LESSONS for named in lesson.named()})


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.rule.split(";")[0])
def test_a_lesson_is_proved_by_tests_that_run(lesson: Lesson) -> None:
    assert re.search(r"CVE-20\d\d-\d{4,6}|\w#\d+|general", lesson.taught_by)
    assert len(lesson.named()) >= 2
    for file, name in lesson.named():
        assert Path(file).name.startswith("test_")
        assert name in collected(file), f"{file} has no {name}"
        assert not collected(file)[name] & LATER, f"{file}::{name} is not run by make test"


def test_the_marks_of_a_test_are_found() -> None:
    """Otherwise a proof that is never run would pass above."""
    assert (
        "slow"
        in collected("integration/test_fuzz.py")[
            "test_many_malformed_requests_do_no_harm_to_any_role"
        ]
    )
    assert "slow" in collected("integration/test_algorithms_learn.py").popitem()[1]


def test_the_page_says_what_travels_in_clear() -> None:
    page = (TESTS.parent / "docs" / "security.md").read_text()
    unprotected = page.partition("## What is not protected")[2]
    assert re.search(r"between ranks.*\(NCCL, gloo\) is in clear", unprotected)


@pytest.mark.slow
def test_pytest_collects_all_of_them() -> None:
    completed = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"),
            *(f"{TESTS / file}::{name}" for file, name in NAMED),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-3000:]
