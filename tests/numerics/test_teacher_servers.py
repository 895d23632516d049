"""A teacher at vLLM servers, against fakes of them on real sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_calls import FakeCall
from support.fake_teacher import NAME, FakeTeacher, fake_teacher
from support.tiny_models import tiny_tokenizer, write_tiny_llama
from support.token_batches import token_batch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.rollout.servers.client import AnswerInvalidError
from rolemesh.engine.rollout.servers.requests import Served, scoring_body
from rolemesh.engine.rollout.servers.teacher_scores import row_scores
from rolemesh.engine.specs import TeacherPromptSpec, TeacherServerSpec
from rolemesh.engine.specs.columns import IS_JUDGED
from rolemesh.rpc.errors import UnavailableError
from rolemesh.services.teacher.served import (
    Scored,
    TeacherAtServers,
    TeacherFailedError,
    TeacherUnavailableError,
)

TOP_K = 4
PROMPT_IDS = (4, 4, 9, 9, 7, 7, 5, 5)


@pytest.fixture
def server() -> Iterator[FakeTeacher]:
    with fake_teacher() as served:
        yield served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


def spec_of(*servers: FakeTeacher, **fields: Any) -> TeacherServerSpec:
    return TeacherServerSpec.model_validate(
        {
            "urls": [one.url for one in servers],
            "model": NAME,
            "timeout_s": 5,
            "deadline_s": 10,
            "breaker_pause_s": 0.2,
            **fields,
        }
    )


def batch() -> Experience:
    return token_batch() | Experience(
        {"prompt_ids": Column(ColumnKind.ROW, torch.tensor(PROMPT_IDS))}
    )


def scored(spec: TeacherServerSpec, top_k: int = TOP_K, call: Any = None) -> Scored:
    """What the servers say of the batch."""

    async def score() -> Scored:
        return await teacher.score(batch(), "taught", top_k, call or FakeCall())

    teacher = TeacherAtServers(spec)
    try:
        teacher.open()
        return asyncio.run(score())
    finally:
        teacher.close()


def check_rows(server: FakeTeacher, columns: Experience, rows: list[int]) -> None:
    """Each row of these is what the table says, token for token."""
    given = batch()
    tokens = list(given["tokens"].rows())
    parts = [list(columns[name].rows()) for name in ("taught", "taught_top_ids", "taught_top")]
    for row in rows:
        first = int(given["prompt_lengths"].values[row])
        places = server.table[tokens[row][first - 1 : -1]]
        logprobs, ids, top = (part[row] for part in parts)
        expected = places.topk(TOP_K, 1)
        assert torch.equal(logprobs, places.gather(1, tokens[row][first:, None])[:, 0])
        assert torch.equal(ids.long(), expected.indices)
        assert torch.equal(top, expected.values)


def test_rows_have_the_numbers_of_the_servers_in_the_columns_of_the_contract(
    server: FakeTeacher,
) -> None:
    with fake_teacher() as other:
        server.token_s = other.token_s = 0.01
        found = scored(spec_of(server, other, max_num_seqs=3))
        assert server.rows
        assert other.rows
        assert server.most_in_flight <= 3
        assert sorted(server.rows + other.rows) == sorted(
            row.tolist() for row in batch()["tokens"].rows()
        )
    check_rows(server, found.columns, list(range(8)))
    assert set(found.columns.columns) == {"taught", "taught_top_ids", "taught_top"}
    assert found.columns["taught_top_ids"].values.dtype == torch.int32
    assert found.columns["taught"].offsets is not None
    assert found.metrics == {}


def test_without_top_k_the_likeliest_are_not_told(server: FakeTeacher) -> None:
    found = scored(spec_of(server), top_k=0).columns
    assert list(found.columns) == ["taught"]
    whole = scored(spec_of(server)).columns
    assert torch.equal(found["taught"].values, whole["taught"].values)


@pytest.mark.parametrize("fault", [429, 500, 503, "hang"])
def test_what_may_pass_is_asked_again(server: FakeTeacher, fault: Any) -> None:
    server.faults = [fault]
    found = scored(spec_of(server, timeout_s=0.5))
    check_rows(server, found.columns, list(range(8)))
    assert len(server.rows) == 9


FAULTS = [
    (400, "status 400"),
    ("no_json", "no JSON"),
    ("huge", "more than"),
    ("short", "prompt_logprobs of"),
    ("nan", "finite log-prob of token"),
    ("floor", "finite log-prob of token"),
    ("positive", "--logprobs-mode raw_logprobs"),
    ("too_much", "--logprobs-mode raw_logprobs"),
    ("not_own", "finite log-prob of token"),
    ("outside", "token ids below 512"),
    ("text_keys", "token ids"),
    ("too_many", "4 likeliest tokens"),
    ("not_likeliest", "the 4 likeliest tokens"),
]


@pytest.mark.parametrize(("fault", "told"), FAULTS, ids=[str(fault) for fault, _ in FAULTS])
def test_a_wrong_answer_is_not_asked_for_again_and_fails_the_call(
    server: FakeTeacher, folder: Path, fault: Any, told: str
) -> None:
    server.faults = [fault]
    with pytest.raises(TeacherFailedError, match=told) as raised:
        scored(spec_of(server, policy_folder=folder))
    assert "row " in str(raised.value)
    assert server.url in str(raised.value)


def fault_of_row_2(fault: Any) -> Any:
    third = list(batch()["tokens"].rows())[2].tolist()
    return lambda row: fault if row == third else None


@pytest.mark.parametrize("fault", [400, 500, "nan", "short"])
def test_a_row_that_fails_is_dropped_with_its_group_and_has_no_number(
    server: FakeTeacher, fault: Any
) -> None:
    server.fault_of = fault_of_row_2(fault)
    found = scored(spec_of(server, on_failure={"type": "drop_group"}))
    check_rows(server, found.columns, [0, 1, 3, 4, 5, 6, 7])
    for name in ("taught", "taught_top"):
        assert list(found.columns[name].rows())[2].isnan().all()
    is_judged = [True, True, False, False, True, True, True, True]
    assert found.columns[IS_JUDGED].values.tolist() == is_judged
    masks = zip(
        found.columns["loss_mask"].rows(), batch()["loss_mask"].rows(), is_judged, strict=True
    )
    for mask, before, judged in masks:
        assert torch.equal(mask, before & judged)
    assert found.metrics == {"teacher/failed_rows": 1.0, "teacher/dropped_rows": 2.0}
    assert "1 of 8 rows" in found.notes[0]
    assert "row 2" in found.notes[0]


def test_a_row_that_is_too_long_is_told_with_both_lengths(server: FakeTeacher) -> None:
    longest = max(len(row) for row in batch()["tokens"].rows())
    server.max_model_len = longest
    with pytest.raises(TeacherFailedError, match=f"has {longest} tokens.*takes {longest}") as told:
        scored(spec_of(server))
    assert f"--max-model-len {longest + 1}" in str(told.value)
    found = scored(spec_of(server, on_failure={"type": "drop_group"}))
    assert found.metrics["teacher/failed_rows"] == 2.0
    # They were not sent.
    assert max(map(len, server.rows)) < longest
    server.max_model_len = longest + 1
    check_rows(server, scored(spec_of(server)).columns, list(range(8)))


def test_servers_that_are_gone_fail_the_call_or_drop_what_is_left(server: FakeTeacher) -> None:
    spec = spec_of(server, deadline_s=1, max_num_seqs=1)
    dropping = spec_of(server, deadline_s=1, max_num_seqs=1, on_failure={"type": "drop_group"})

    def dies(row: list[int]) -> Any:
        if len(server.rows) == 3:
            server._loop.call_soon(server._server.close)
            for writer in server._writers:
                writer.transport.abort()
        return None

    server.fault_of = dies
    found = scored(dropping)
    assert 6 <= found.metrics["teacher/failed_rows"] <= 7
    assert found.columns[IS_JUDGED].values.any() == (found.metrics["teacher/dropped_rows"] < 8)
    with pytest.raises(TeacherUnavailableError, match=r"teacher\.server\.urls"):
        scored(spec)


def test_top_k_above_what_a_server_tells_names_its_option_whatever_the_policy(
    server: FakeTeacher,
) -> None:
    server.max_logprobs = TOP_K - 1
    for fields in ({}, {"on_failure": {"type": "drop_group"}}):
        with pytest.raises(TeacherFailedError, match=f"--max-logprobs {TOP_K}"):
            scored(spec_of(server, **fields))


def test_a_call_that_nobody_waits_for_ends(server: FakeTeacher) -> None:
    server.fault_of = lambda row: "hang"
    call = FakeCall()
    call.is_wanted = False
    with pytest.raises(UnavailableError, match="drains"):
        scored(spec_of(server), call=call)


def test_a_teacher_is_told_more_than_its_student(server: FakeTeacher, folder: Path) -> None:
    tokenizer = tiny_tokenizer(512)

    def rendered(question: str) -> str:
        turns = [{"role": "user", "content": question}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    completion, prompt = [30, 31, 32], tokens(rendered("2 + 3?"))
    row = Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, [[*prompt, *completion]], torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([len(prompt)])),
            "prompt_text": Column.text([rendered("2 + 3?")]),
            "answer": Column.text(["5"]),
        }
    )
    hint = TeacherPromptSpec(template="{prompt} (It is {answer}.)")
    teacher = TeacherAtServers(spec_of(server, policy_folder=folder), hint)
    try:
        teacher.open()
        call: Any = FakeCall()
        found = asyncio.run(teacher.score(row.require(teacher.columns), "taught", TOP_K, call))
    finally:
        teacher.close()
    told = [*tokens(rendered("2 + 3? (It is 5.)")), *completion]
    assert server.rows == [told]
    places = server.table[told[-4:-1]]
    expected = places.gather(1, torch.tensor(completion)[:, None])[:, 0]
    assert torch.equal(found.columns["taught"].values, expected)
    with pytest.raises(ValueError, match=r"teacher\.server\.policy_folder is not"):
        TeacherAtServers(spec_of(server), hint)


# --- at the start ------------------------------------------------------------------------------


def refusal(spec: TeacherServerSpec) -> str:
    with pytest.raises(TeacherFailedError) as raised:
        TeacherAtServers(spec).open()
    return str(raised.value)


def test_a_model_that_is_not_there_is_named_with_those_that_are(server: FakeTeacher) -> None:
    told = refusal(spec_of(server, model="other"))
    assert "serves no model 'other'" in told
    assert f"['{NAME}']" in told


def test_a_server_of_adapters_is_asked_for_one_row_at_a_time(server: FakeTeacher) -> None:
    server.has_adapter = True
    for model in (NAME, "adapted"):
        told = refusal(spec_of(server, model=model))
        assert "teacher.server.max_num_seqs to 1" in told
        found = scored(spec_of(server, model=model, max_num_seqs=1))
        check_rows(server, found.columns, list(range(8)))
        assert server.most_in_flight == 1


def test_numbers_that_are_no_log_probs_are_seen_at_the_start(server: FakeTeacher) -> None:
    server.scales = -1.0
    assert "--logprobs-mode raw_logprobs" in refusal(spec_of(server))


def test_a_server_that_has_fewer_tokens_than_the_policy_is_refused(folder: Path) -> None:
    last = max(tiny_tokenizer(512).get_vocab().values())
    with fake_teacher(vocab_size=last) as small:
        assert f"lacks a token of [0, {last // 2}, {last}]" in refusal(
            spec_of(small, policy_folder=folder)
        )


def test_texts_are_tokenised_by_both(server: FakeTeacher, folder: Path) -> None:
    tokenizer = tiny_tokenizer(512)

    def compared() -> str:
        teacher = TeacherAtServers(spec_of(server, policy_folder=folder))
        try:
            teacher.open()
            return teacher.compared
        finally:
            teacher.close()

    assert "no route /tokenize" in compared()
    server.tokenize = lambda text: tokenizer.encode(text, add_special_tokens=False)
    assert "5 texts" in compared()
    server.tokenize = lambda text: tokenizer.encode(text.lower(), add_special_tokens=False)
    assert "take a teacher with the policy's tokenizer" in refusal(
        spec_of(server, policy_folder=folder)
    )


def test_a_folder_without_a_model_is_named(server: FakeTeacher, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"teacher\.server\.policy_folder"):
        TeacherAtServers(spec_of(server, policy_folder=tmp_path))


def test_a_server_that_does_not_listen_is_waited_for_until_the_deadline(
    server: FakeTeacher,
) -> None:
    server.kill()
    with pytest.raises(TeacherUnavailableError, match=server.url):
        TeacherAtServers(spec_of(server, deadline_s=0.5)).open()


# --- answers -----------------------------------------------------------------------------------


def test_a_row_is_sent_as_token_ids_at_temperature_1() -> None:
    body = scoring_body([1, 5, 9], Served(model=NAME), top_k=3)
    assert body["prompt"] == [1, 5, 9]
    assert (body["prompt_logprobs"], body["max_tokens"], body["model"]) == (3, 1, NAME)


def test_the_likeliest_are_in_order_and_the_rows_own_is_one_of_them_or_beside() -> None:
    half, quarter, rest = (math.log(p) for p in (0.5, 0.25, 0.2))
    places = [
        None,
        {"9": {"logprob": rest}, "3": {"logprob": quarter}, "7": {"logprob": half}},
        {"7": {"logprob": half}, "3": {"logprob": quarter}},
    ]
    answer = {"choices": [{"prompt_logprobs": places}]}
    found = row_scores(answer, [1, 9, 7], 1, 2, vocab_size=10, where="here")
    assert found.logprobs == [rest, half]
    assert found.top_ids == [[7, 3], [7, 3]]
    assert found.top == [[half, quarter], [half, quarter]]
    with pytest.raises(AnswerInvalidError, match="token ids below 9"):
        row_scores(answer, [1, 9, 7], 1, 2, vocab_size=9, where="here")
