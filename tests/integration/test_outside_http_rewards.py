"""Rewards over HTTP in other people's forms: what servers are sent, and what answers are worth."""

from dataclasses import replace

import pytest
from support.fake_rewards import row
from support.http_rewards import ROWS, SCORES, judged, made
from support.reward_servers import reward_server

from rolemesh.engine.images.prompt_images import data_url
from rolemesh.services.reward.outside.base import RewardAnswerInvalidError


@pytest.fixture
def server():
    with reward_server() as served:
        yield served


async def test_openrlhf_servers_get_lists_and_their_logs_become_metrics(server):
    found = await judged(server.url + "/get_reward")
    assert found.rewards == SCORES
    (request,) = server.requests
    assert request == (
        "/get_reward",
        {
            "query": ["pabc", "paab", "q"],
            "prompts": ["p", "p", "q"],
            "labels": ["3", None, None],
        },
    )
    assert found.metrics["distinct"] == pytest.approx(5 / 3)
    assert found.metrics["scores"] == pytest.approx(2 / 3)
    assert found.metrics["latency_p50_seconds"] > 0


async def test_openrlhf_servers_that_take_one_row_may_answer_bare_numbers(server):
    found = await judged(server.url + "/get_reward_bare", batch_size=1)
    assert found.rewards == SCORES
    assert len(server.requests) == 3
    found = await judged(server.url + "/get_reward_bare")
    assert isinstance(found.failures[0], RewardAnswerInvalidError)
    assert "batch_size" in str(found.failures[0])


async def test_slime_servers_get_one_row_a_request(server):
    found = await judged(server.url + "/slime", type="slime")
    assert found.rewards == SCORES
    assert ("/slime", {"prompt": "p", "response": "abc", "label": "3"}) in server.requests
    assert len(server.requests) == 3
    found = await judged(server.url + "/slime_mapping", type="slime", reward_key="score")
    assert found.rewards == SCORES
    assert found.parts == [{"length": 3.0}, {"length": 3.0}, {"length": 0.0}]
    found = await judged(server.url + "/slime_mapping", type="slime")
    assert found.rewards == SCORES
    found = await judged(server.url + "/slime_mapping", type="slime", reward_key="grade")
    assert "reward_key" in str(found.failures[0])


def test_an_entry_of_a_server_may_be_an_object_with_score_and_parts():
    (replica,) = made("http://h/get_reward")._replicas
    found = replica.client._judged([{"score": 1.0, "acc": True}, 0.5], 2)
    assert (found.rewards, found.parts) == ([1.0, 0.5], [{"acc": 1.0}, {}])
    with pytest.raises(RewardAnswerInvalidError, match="row 1 has the part 'acc', which is nan"):
        replica.client._judged([0.5, {"score": 1.0, "acc": float("nan")}], 2)


async def test_nemo_gym_servers_get_a_response_and_keep_rows_apart_by_cookies(server):
    found = await judged(server.url + "/verify", type="nemo_gym", seeds_session=True)
    assert found.rewards == SCORES
    cookies = {headers["cookie"] for headers in server.headers}
    assert cookies == {"gym=p", "gym=q"}
    _, given = server.requests[0]
    assert given["responses_create_params"]["input"][0]["role"] == "user"
    assert given["response"]["output"][0]["type"] == "message"


IMAGE = data_url(b"\xff\xd8\xff of a JPEG")
SHOWN = [replace(one, images=images) for one, images in zip(ROWS, [(IMAGE,), (), ()], strict=True)]
"""Rows of which the first has an image."""


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"type": "openrlhf"}, "/get_reward"),
        ({"type": "slime"}, "/slime"),
        ({"type": "nemo_gym"}, "/verify"),
        ({"type": "openai_judge", "model": "m", "rubric": "{completion}", "maximum": 9}, "/v1"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
async def test_a_row_without_images_is_sent_as_it_was_before_there_were_any(server, source, path):
    await judged(server.url + path, ROWS[1:], **source)
    before = sorted(map(str, server.requests))
    server.requests.clear()
    await judged(server.url + path, SHOWN[1:], **source)
    assert sorted(map(str, server.requests)) == before


async def test_images_go_to_servers_whose_form_has_a_place_for_them(server):
    assert IMAGE.startswith("data:image/jpeg;base64,")
    found = await judged(server.url + "/get_reward", SHOWN)
    assert found.rewards == SCORES
    (request,) = server.requests
    assert request[1]["images"] == [[IMAGE], [], []]
    server.requests.clear()
    await judged(server.url + "/slime", SHOWN[:1], type="slime")
    ((_, body),) = server.requests
    assert body == {"prompt": "p", "response": "abc", "label": "3", "images": [IMAGE]}
    server.requests.clear()
    await judged(server.url + "/verify", SHOWN[:1], type="nemo_gym")
    ((_, body),) = server.requests
    assert "images" not in body
    assert body["responses_create_params"]["input"][0]["content"] == [
        {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
        {"type": "input_text", "text": "p"},
    ]


async def test_a_judge_sees_images_in_front_of_the_rubric(server):
    source = {"type": "openai_judge", "model": "m", "rubric": "{completion}", "maximum": 9}
    await judged(server.url + "/v1", SHOWN[:1], **source)
    ((_, body),) = server.requests
    system, user = body["messages"]
    assert isinstance(system["content"], str)
    assert user["content"] == [
        {"type": "image_url", "image_url": {"url": IMAGE}},
        {"type": "text", "text": "abc"},
    ]


async def test_rows_that_differ_in_their_images_alone_are_not_taken_for_each_other(server):
    other = replace(SHOWN[0], images=(data_url(b"\x89PNG\r\n\x1a\n of another"),))
    for path, source in (("/get_reward", "openrlhf"), ("/slime", "slime"), ("/verify", "nemo_gym")):
        found = await judged(
            server.url + path, [SHOWN[0], other, SHOWN[0]], type=source, cache_rows=9
        )
        assert found.metrics["cache_hits"] == 0
        client = made([server.url + path], type=source)._replicas[0].client
        assert client.sent(SHOWN[0]) != client.sent(other)


async def test_a_failure_class_of_nemo_gym_is_a_failure_and_no_reward_of_0(server):
    server.always = "judge_failed"
    found = await judged(server.url + "/verify", type="nemo_gym")
    assert sorted(found.failures) == [0, 1, 2]
    assert "judge_failed" in str(found.failures[0])
    assert len(server.requests) == 3


def judge(url, **given):
    source = {"type": "openai_judge", "model": "m", "rubric": "Is {completion} short?", **given}
    return judged(url + "/v1", rows=ROWS[:1], **source)


async def test_a_judge_is_asked_greedily_and_its_score_is_scaled(server):
    found = await judge(server.url, maximum=10.0)
    assert found.rewards == [0.7]
    path, given = server.requests[0]
    assert path == "/v1/chat/completions"
    assert (given["temperature"], given["seed"], given["model"]) == (0, 0, "m")
    assert given["messages"][1]["content"] == "Is abc short?"


async def test_what_a_completion_has_in_braces_is_not_filled_in(server):
    source = {"type": "openai_judge", "model": "m", "rubric": "{completion} of {answer}"}
    await judged(server.url + "/v1", rows=[row("{answer}{prompt.x}", answer="s")], **source)
    assert server.requests[0][1]["messages"][1]["content"] == "{answer}{prompt.x} of s"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7", 0.7),
        ('```json\n{"score": 2.5}\n```', 0.25),
        ("It is quite good.\n\nScore: 9", 0.9),
        ('{"score": 0}', 0.0),
    ],
)
async def test_a_judge_may_say_its_score_in_these_ways(server, text, reward):
    server.judge_text = text
    assert (await judge(server.url)).rewards == pytest.approx([reward])


@pytest.mark.parametrize(
    "text",
    [
        "11",
        '{"score": -1}',
        '{"score": "7"}',
        '{"score": true}',
        '{"score": 1e999}',
        "somewhere between 3 and 4",
        "__import__('os').system('echo 7')",
        "1+6",
        "9" * 5000,
        " ",
    ],
)
async def test_a_judge_that_says_anything_else_has_failed(server, text):
    server.judge_text = text
    found = await judge(server.url)
    assert isinstance(found.failures[0], RewardAnswerInvalidError)
    assert len(server.requests) == 1
