"""What clients of OpenAI's protocol and of token ids are answered."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.endpoints import ADD, FIRST_VERSION, LETTERS, MAX_MODEL_LEN, Served

LOGPROB = 5e-4
"""What is promised of sampler and trainer in float32; seen here: 1e-6."""
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
HELLO_TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def chat(served: Served, **asked: Any) -> Any:
    return served.openai.chat.completions.create(
        **{"model": "policy", "messages": HELLO, "max_tokens": 8, "seed": 1, **asked}
    )


def refused(served: Served, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = served.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_models_say_how_long_a_text_may_be(served: Served) -> None:
    (model,) = served.openai.models.list().data
    assert model.id == "policy"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == MAX_MODEL_LEN
    assert served.http.get("/health").json() == {"status": "ok"}


def test_a_chat_is_answered_with_the_tokens_of_its_template(served: Served) -> None:
    answer = chat(served, extra_body={"return_token_ids": True}, logprobs=True, top_logprobs=3)
    prompt = answer.model_extra["prompt_token_ids"]
    assert served.sampler.tokenizer.decode(prompt) == HELLO_TEXT
    (choice,) = answer.choices
    tokens = choice.model_extra["token_ids"]
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokens) == 8
    assert choice.finish_reason == "length"
    given = [one.logprob for one in choice.logprobs.content]
    scores = served.sampler.scores(prompt, tokens, [FIRST_VERSION] * 8)
    assert given == pytest.approx(scores, abs=LOGPROB)
    for one in choice.logprobs.content:
        # VLLM begins with the token that was drawn.
        drawn, *others = (other.logprob for other in one.top_logprobs)
        assert drawn == one.logprob
        assert others == sorted(others, reverse=True)
        assert len(others) == 2


def test_the_same_seed_gives_the_same_tokens_and_another_does_not(served: Served) -> None:
    texts = [chat(served, seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_calls_without_a_seed_are_drawn_each_for_itself(served: Served) -> None:
    """The engine's own random state is put back after each step: it must not draw for them."""
    answers = [
        chat(
            served,
            seed=None,
            max_tokens=16,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        for _ in range(4)
    ]
    drawn = [tuple(answer.choices[0].model_extra["token_ids"]) for answer in answers]
    assert len(set(drawn)) == 4
    # Nor are a call's tokens drawn with one noise: of a flat distribution, few would be repeated.
    assert all(len(set(tokens)) > 8 for tokens in drawn)


def test_several_completions_of_one_call_differ(served: Served) -> None:
    answer = chat(served, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    # Eight tokens of 512: that two are the same by chance has a probability below 1e-9.
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens == 24


def test_a_greedy_answer_is_that_of_the_model(served: Served) -> None:
    answer = chat(served, temperature=0, extra_body={"return_token_ids": True})
    tokens, prompt = answer.choices[0].model_extra["token_ids"], answer.model_extra
    (best,) = served.sampler.model(FIRST_VERSION).generate(
        input_ids=_tensor([prompt["prompt_token_ids"]]), max_new_tokens=8, do_sample=False
    )
    assert tokens == best[-8:].tolist()


def _tensor(rows: list[list[int]]) -> Any:
    import torch

    return torch.tensor(rows)


def test_a_stream_brings_what_one_answer_would_and_its_usage(served: Served) -> None:
    whole = chat(served)
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_a_text_that_stops_a_completion_ends_it(served: Served) -> None:
    whole = chat(served, extra_body={"allowed_token_ids": LETTERS}).choices[0].message.content
    stop = whole[3]
    answer = chat(served, stop=[stop], extra_body={"allowed_token_ids": LETTERS})
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_has_the_form_that_is_asked_for(served: Served) -> None:
    schema = ADD["function"]["parameters"]  # type: ignore[index]
    answer = chat(
        served,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["a"] <= 99


def test_a_tool_that_must_be_called_is(served: Served) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice in (named, "required"):
        answer = chat(served, max_tokens=96, tools=[ADD], tool_choice=choice)
        (called,) = answer.choices[0].message.tool_calls
        assert called.function.name == "add"
        json.loads(called.function.arguments)


def test_a_tool_that_the_model_calls_by_itself_is_read(served: Served) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    answer = chat(
        served,
        max_tokens=96,
        tools=[ADD],
        extra_body={"structured_outputs": {"choice": [text]}, "return_token_ids": True},
    )
    (called,) = answer.choices[0].message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"a": 2})
    assert answer.choices[0].finish_reason == "tool_calls"
    prompt = served.sampler.tokenizer.decode(answer.model_extra["prompt_token_ids"])
    assert prompt.startswith("<|im_start|>system\nTools: [{")


def test_completions_continue_a_text_or_tokens(served: Served) -> None:
    tokens = served.sampler.tokenizer.encode("hello")
    answers = [
        served.openai.completions.create(
            model="policy",
            prompt=prompt,
            max_tokens=6,
            seed=3,
            logprobs=1,
            extra_body={"return_token_ids": True},
        )
        for prompt in ("hello", tokens)
    ]
    drawn = [answer.choices[0].model_extra["token_ids"] for answer in answers]  # type: ignore[index]
    assert drawn[0] == drawn[1]
    given = answers[0].choices[0].logprobs
    assert given is not None
    scores = served.sampler.scores(tokens, drawn[0], [FIRST_VERSION] * 6)
    assert given.token_logprobs == pytest.approx(scores, abs=LOGPROB)


def test_tokenize_says_what_a_chat_would_be(served: Served) -> None:
    given = served.http.post("/tokenize", json={"model": "policy", "messages": HELLO}).json()
    assert served.sampler.tokenizer.decode(given["tokens"]) == HELLO_TEXT
    assert (given["count"], given["max_model_len"]) == (len(given["tokens"]), MAX_MODEL_LEN)


def test_tokens_go_in_and_tokens_come_out(served: Served) -> None:
    prompt = [5, 6, 7]
    sampling = {"max_tokens": 6, "seed": 4, "logprobs": 0, "temperature": 1.0}
    body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
    (choice,) = served.http.post("/inference/v1/generate", json=body).json()["choices"]
    tokens = choice["token_ids"]
    assert len(tokens) == 6
    given = [one["logprob"] for one in choice["logprobs"]["content"]]
    scores = served.sampler.scores(prompt, tokens, [FIRST_VERSION] * 6)
    assert given == pytest.approx(scores, abs=LOGPROB)
    (span,) = choice["weight_versions"]
    assert (span["start"], int(span["version"])) == (0, FIRST_VERSION)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 1}}),
    ],
)
def test_a_field_that_is_not_served_is_named(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    error = refused(served, path, {"model": "policy", **body, "max_tokenz": 3})
    assert error["param"] == "max_tokenz"
    assert "max_tokenz is not served" in error["message"]
    # Without a value it changes nothing.
    given = {"model": "policy", **body, "max_tokenz": None}
    assert served.http.post(path, json=given).status_code == 200


@pytest.mark.parametrize(
    ("field", "neutral", "other"),
    [
        ("use_beam_search", False, True),
        ("best_of", 1, 2),
        ("priority", 0, 1),
        ("service_tier", "auto", "flex"),
        ("store", False, True),
        ("echo", False, True),
        ("kv_transfer_params", None, {"prompt_token_ids": [1]}),
        ("chat_template", None, "{{ 1 }}"),
        ("truncate_prompt_tokens", None, 3),
    ],
)
def test_a_field_that_is_not_served_may_say_what_it_is_without(
    served: Served, field: str, neutral: Any, other: Any
) -> None:
    body = {"model": "policy", "messages": HELLO, "max_tokens": 1}
    path = "/v1/chat/completions"
    assert served.http.post(path, json={**body, field: neutral}).status_code == 200
    assert refused(served, path, {**body, field: other})["param"] == field


def test_a_parameter_of_sampling_that_is_none_is_named(served: Served) -> None:
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1, "max_tokenz": 3}}
    error = refused(served, "/inference/v1/generate", body)
    assert error["param"] == "sampling_params.max_tokenz"
    body["sampling_params"] = {"max_tokens": 1, "max_tokenz": None, "top_k": 3}
    assert served.http.post("/inference/v1/generate", json=body).status_code == 200


def test_a_prompt_that_is_too_long_is_told_so(served: Served) -> None:
    long = [{"role": "user", "content": "X" * MAX_MODEL_LEN}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(served, messages=long)
    body = {"model": "policy", "prompt": [5] * (MAX_MODEL_LEN + 1)}
    assert "maximum context length" in refused(served, "/v1/completions", body)["message"]
    body = {"token_ids": [5] * MAX_MODEL_LEN, "sampling_params": {"max_tokens": 1}}
    assert "length" in refused(served, "/inference/v1/generate", body)["message"]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_none_is_refused(served: Served, field: str, number: str) -> None:
    body = f'{{"model": "policy", "prompt": "a", "max_tokens": 1, "{field}": {number}}}'
    answer = served.http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text


def test_another_model_is_not_there(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-6"):
        chat(served, model="gpt-6")


def test_an_answer_follows_a_refusal_at_once(served: Served) -> None:
    # A refusal must leave nothing behind that keeps the next call from the sampler.
    for _ in range(3):
        refused(served, "/v1/completions", {"model": "policy", "prompt": [10_000]})
        assert chat(served).choices[0].finish_reason == "length"


def test_a_model_of_text_refuses_images_by_name(served: Served) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "policy", "messages": [{"role": "user", "content": [picture]}]}
    said = refused(served, "/v1/chat/completions", body)
    assert "this model takes none: send text" in said["message"]
