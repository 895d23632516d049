import re

import pytest
from pydantic import ValidationError

from rolemesh.engine.specs import (
    ArithmeticRewardSpec,
    CostSpec,
    DropGroupSpec,
    JudgeRewardSpec,
    NemoGymRewardSpec,
    OpenRlhfRewardSpec,
    RewardSpec,
    SlimeRewardSpec,
    WeightedSumSpec,
    may_drop_groups,
    named_sources,
)


def source_of(reward):
    return RewardSpec.model_validate(reward).source


@pytest.mark.parametrize(
    ("text", "source_type"),
    [
        ("http://h:5000/get_reward", "openrlhf"),
        ("https://h/anything", "openrlhf"),
        ("http://h/verify", "nemo_gym"),
        ("http://h/gym/verify/", "nemo_gym"),
        ("grpc://h:50051", "grpc"),
        ("grpcs://h:443", "grpc"),
        ("python:my.module:judge", "python"),
        ("python:rewards/mine.py:judge", "python"),
    ],
)
def test_a_text_is_a_source(text, source_type):
    for reward in (text, {"source": text}):
        assert source_of(reward).type == source_type
    assert CostSpec.model_validate(text).source.type == source_type


def test_a_list_is_a_weighted_sum():
    source = source_of(
        [
            {"source": "http://h/get_reward", "weight": 2, "name": "helpful"},
            {"source": {"type": "arithmetic"}, "weight": 0.5},
            "http://g/verify",
        ]
    )
    assert isinstance(source, WeightedSumSpec)
    kinds = [type(reward.source) for reward in source.rewards]
    assert kinds == [OpenRlhfRewardSpec, ArithmeticRewardSpec, NemoGymRewardSpec]
    assert [reward.weight for reward in source.rewards] == [2.0, 0.5, 1.0]
    assert [reward.name for reward in named_sources(source)] == [
        "helpful",
        "arithmetic",
        "nemo_gym",
    ]


@pytest.mark.parametrize(
    "reward",
    ["http://h/get_reward", ["http://h/verify", {"source": {"type": "arithmetic"}}]],
    ids=["text", "list"],
)
def test_what_is_printed_of_a_short_form_is_read_again_as_the_same(reward):
    spec = RewardSpec.model_validate(reward)
    printed = spec.model_dump(mode="json")
    assert isinstance(printed["source"], dict)
    assert RewardSpec.model_validate(printed) == spec


def test_sources_without_names_get_different_ones():
    source = source_of(["http://a/x", {"source": "http://b/x", "name": "openrlhf-2"}, "http://c/x"])
    names = [reward.name for reward in named_sources(source)]
    assert names == ["openrlhf", "openrlhf-2", "openrlhf-3"]


def test_names_given_twice_are_refused():
    with pytest.raises(ValidationError, match="'a' twice"):
        source_of([{"source": "http://a/x", "name": "a"}, {"source": "http://b/x", "name": "a"}])


@pytest.mark.parametrize("text", ["ftp://h/x", "h:5000", "python:module", "grpc://", "sum"])
def test_a_text_that_is_no_source_is_refused_with_all_forms(text):
    with pytest.raises(ValidationError) as error:
        source_of(text)
    message = str(error.value)
    assert repr(text) in message
    assert "did you mean" not in message
    for form in ("grpc://host:port", "get_reward", "/verify", "python:module:function", "type"):
        assert form in message


@pytest.mark.parametrize(
    "given",
    [
        {"type": "openrlhf", "urls": []},
        {"type": "openrlhf", "urls": ["grpc://h:1"]},
        {"type": "openrlhf", "urls": ["http://"]},
        {"type": "openrlhf", "urls": ["http://h:99999999/x"]},
        {"type": "openrlhf", "urls": ["http://h/x"], "tries": 0},
        {"type": "openrlhf", "urls": ["http://h/x"], "timeout_s": 0},
        {"type": "openrlhf", "urls": ["http://h/x"], "minimum": 1, "maximum": 0},
        {"type": "openrlhf", "urls": ["http://h/x"], "on_failure": {"type": "value"}},
        {"type": "openrlhf", "urls": ["http://h/x"], "on_failure": {"type": "ignore"}},
        {"type": "slime", "urls": ["http://h/x"], "batch_size": 2},
        {"type": "openai_judge", "urls": ["http://h/v1"], "model": "m"},
        {"type": "openai_judge", "urls": ["http://h"], "model": "m", "rubric": "r", "minimum": 10},
        {"type": "weighted_sum", "rewards": []},
        {"type": "weighted_sum", "rewards": [{"source": {"type": "weighted_sum", "rewards": []}}]},
    ],
)
def test_what_makes_no_sense_is_refused(given):
    with pytest.raises(ValidationError):
        source_of({"source": given})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("rewards:letters", "did you mean python:rewards.py:letters?"),
        ("my/rewards.py:letters", "did you mean python:my/rewards.py:letters?"),
        ("python:rewards.py", "did you mean python:rewards.py:FUNCTION?"),
        ("rewards.py", "did you mean python:rewards.py:FUNCTION?"),
        ("arithmetic", "'arithmetic' is a type: write source: {type: arithmetic}"),
    ],
)
def test_a_text_that_lacks_a_part_is_answered_with_the_whole_form(text, hint):
    for reward in (text, [text]):
        with pytest.raises(ValidationError) as caught:
            source_of(reward)
        assert hint in str(caught.value)


def test_a_password_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(ValidationError) as error:
        source_of("http://user:hunter2@h/get_reward")
    assert "token_variable" in str(error.value.errors()[0]["msg"])
    assert "hunter2" not in str(error.value.errors()[0]["msg"])


@pytest.mark.parametrize(
    ("urls", "variable", "refused"),
    [
        ("https://h/get_reward", "JUDGE_TOKEN", ""),
        ("http://127.0.0.1:5000/get_reward", "OPENAI_API_KEY", ""),
        ("http://[::1]:5000/get_reward", "JUDGE_TOKEN", ""),
        ("http://localhost/get_reward", "judge_token", ""),
        ("http://h/get_reward", "JUDGE_TOKEN", "not encrypted: give https://"),
        (["https://h/x", "http://127.0.0.1.h/x"], "JUDGE_TOKEN", "'http://127.0.0.1.h/x'"),
        ("https://h/get_reward", "ROLEMESH_API_TOKEN", "a variable of rolemesh itself"),
        ("https://h/get_reward", "Rolemesh_x_token", "a variable of rolemesh itself"),
        ("https://h/get_reward", "PATH", "does not end with TOKEN or KEY"),
        ("https://h/get_reward", "DATABASE_URL", "does not end with TOKEN or KEY"),
    ],
)
def test_a_token_goes_to_nobody_who_could_read_it_on_its_way(urls, variable, refused):
    given = {"type": "openrlhf", "urls": urls, "token_variable": variable}
    if not refused:
        assert source_of({"source": given}).token_variable == variable
        return
    with pytest.raises(ValidationError, match=re.escape(refused)):
        source_of({"source": given})


def test_a_token_is_not_sent_over_grpc_in_clear():
    given = {"type": "grpc", "urls": "grpc://h:50051", "token_variable": "JUDGE_TOKEN"}
    with pytest.raises(ValidationError, match="not encrypted: give grpcs://"):
        source_of({"source": given})
    assert source_of({"source": {**given, "urls": "grpcs://h:50051"}}).token_variable


def test_no_part_of_a_url_with_a_password_is_told_whatever_else_is_wrong_with_it():
    for url in ("http://me:hunter2@[h/x", "ftp://me:hunter2@h/x", "http://me:hunter2@h:x/"):
        with pytest.raises(ValidationError) as error:
            source_of({"source": {"type": "openrlhf", "urls": url}})
        assert "hunter2" not in str(error.value)


def test_failing_is_the_default_and_dropping_is_known():
    source = source_of("http://h/get_reward")
    assert source.on_failure.type == "fail"
    assert not may_drop_groups(source)
    dropping = source_of(
        [
            {"source": {"type": "arithmetic"}},
            {
                "source": {
                    "type": "slime",
                    "urls": "http://h/x",
                    "on_failure": {"type": "drop_group"},
                }
            },
        ]
    )
    assert isinstance(dropping.rewards[1].source, SlimeRewardSpec)
    assert isinstance(dropping.rewards[1].source.on_failure, DropGroupSpec)
    assert may_drop_groups(dropping)


def test_a_judge_asks_row_by_row_and_has_a_scale():
    source = source_of(
        {
            "source": {
                "type": "openai_judge",
                "urls": "http://h/v1",
                "model": "m",
                "rubric": "short?",
            }
        }
    )
    assert isinstance(source, JudgeRewardSpec)
    assert (source.minimum, source.maximum, source.batch_size) == (0.0, 10.0, 1)
