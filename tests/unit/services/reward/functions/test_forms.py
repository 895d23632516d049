"""A function's form is told from its parameters, and it gets what its form promises."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.tiny_images import noise, png

from rolemesh.engine.data.answers import json_text
from rolemesh.engine.images.prompt_images import data_url
from rolemesh.services.reward.outside.base import RewardRow
from rolemesh.services.reward.outside.functions.answers import FunctionFaultError
from rolemesh.services.reward.outside.functions.forms import Batch, form_of
from rolemesh.services.reward.outside.functions.reward import _plain


def row(completion: str, answer: str = "", **metadata: Any) -> dict[str, Any]:
    return {
        "prompt": "<user>hi",
        "completion": completion,
        "query": f"<user>hi{completion}</s>",
        "completion_ids": [7, 8],
        "answer": answer,
        "metadata": metadata,
    }


def seen_by(function: Callable[..., Any], *rows: dict[str, Any], form: str = "auto") -> Any:
    return form_of(function, form).call(Batch(rows, 5))


def test_a_trl_function_gets_all_by_keyword() -> None:
    def function(**kwargs: Any) -> dict[str, Any]:
        return kwargs

    seen = seen_by(function, row("a", "4", level=1), row("b"), form="trl")
    assert seen["prompts"] == ["<user>hi", "<user>hi"]
    assert seen["completions"] == ["a", "b"]
    assert seen["completion_ids"] == [[7, 8], [7, 8]]
    assert seen["level"] == [1, None]
    assert seen["answer"] == ["4", None]
    assert seen["trainer_state"].global_step == 5
    assert callable(seen["log_extra"])
    assert callable(seen["log_metric"])


def test_an_answer_that_is_no_text_comes_as_it_is() -> None:
    def trl(completions: Any, answer: Any) -> Any:
        return answer

    def openrlhf(queries: Any, prompts: Any, labels: Any) -> Any:
        return labels

    values: list[Any] = [["4", "four"], False, {"low": 3}, [], "4"]
    given = [(one, {} if isinstance(one, str) else {"answer": one}) for one in values]
    sent = [(one if isinstance(one, str) else json_text(one), metadata) for one, metadata in given]
    rows = [
        _plain(
            RewardRow(prompt="p", completion="c", query="pc", answer=text, metadata=metadata),
            with_images=False,
        )
        for text, metadata in [*sent, ("", {})]
    ]
    assert seen_by(trl, *rows) == [*values, None]
    assert seen_by(openrlhf, *rows) == [*values, None]


def test_a_function_without_kwargs_gets_what_it_names() -> None:
    def function(completions: Any, level: Any, absent: int = 3) -> Any:
        return completions, level, absent

    assert seen_by(function, row("a", level=1)) == (["a"], [1], 3)


def test_messages_of_the_data_make_a_conversation() -> None:
    def function(prompts: Any, completions: Any) -> Any:
        return prompts, completions

    messages = [{"role": "user", "content": "hi"}]
    prompts, completions = seen_by(function, row("a", prompt=messages))
    assert prompts == [messages]
    assert completions == [[{"role": "assistant", "content": "a"}]]


def test_a_prompt_that_the_data_keeps_as_text_is_handed_over_unrendered() -> None:
    def function(prompts: Any, completions: Any) -> Any:
        return prompts, completions

    assert seen_by(function, row("a", prompt="hi")) == (["hi"], ["a"])


def test_an_openrlhf_function_gets_three_lists_by_position() -> None:
    def reward_func(query: Any, prompt: Any, label: Any) -> Any:
        return query, prompt, label

    seen = seen_by(reward_func, row("a", "4"), row("b"), form="openrlhf")
    assert seen == (["<user>hia</s>", "<user>hib</s>"], ["<user>hi"] * 2, ["4", None])


VERL_ROWS = [
    row("a", "4", data_source="gsm8k", extra_info={"index": 0, "split": None}),
    row("b", data_source="math"),
]
VERL_SEEN = [
    {
        "data_source": "gsm8k",
        "solution_str": "a",
        "ground_truth": "4",
        "extra_info": {"index": 0, "split": None},
    },
    {"data_source": "math", "solution_str": "b", "ground_truth": None, "extra_info": {}},
]


def test_a_verl_function_gets_row_by_row_what_it_names() -> None:
    def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, **kwargs: Any) -> Any:
        return {**locals(), **kwargs}

    def short(solution_str: Any, ground_truth: Any, method: str = "strict") -> Any:
        return solution_str, ground_truth, method

    seen = seen_by(compute_score, *VERL_ROWS)
    assert [{k: v for k, v in one.items() if k != "kwargs"} for one in seen] == VERL_SEEN
    # Without a parameter for it, no row needs a data_source.
    assert seen_by(short, row("a", "4"), row("b")) == [("a", "4", "strict"), ("b", None, "strict")]


def test_a_batch_function_of_verl_gets_lists() -> None:
    def compute_score(
        data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any = None
    ) -> Any:
        return locals()

    assert seen_by(compute_score, *VERL_ROWS) == {
        f"{name}s": [one[name] for one in VERL_SEEN] for name in VERL_SEEN[0]
    }


def test_an_async_verl_function_is_awaited_for_all_rows_at_once() -> None:
    met = asyncio.Event()

    async def compute_score(solution_str: str) -> float:
        if solution_str == "b":
            met.set()
        await met.wait()
        return float(len(solution_str))

    async def scores() -> Any:
        return await seen_by(compute_score, row("aaa"), row("b"))

    assert asyncio.run(scores()) == [3.0, 1.0]


def test_what_verl_does_not_give_is_named() -> None:
    with pytest.raises(FunctionFaultError, match=r"needs \['strict'\].*a default"):
        form_of(lambda solution_str, strict, tags=(): 0, "auto")
    with pytest.raises(FunctionFaultError, match=r"row 1 has no data_source; add that column"):
        seen_by(lambda data_source, solution_str: 0, VERL_ROWS[0], row("b"))
    form = form_of(lambda solution_str: None, "auto")
    with pytest.raises(FunctionFaultError, match="at row 0 is None"):
        form.read([None], Batch([row("a")], 0))


def test_auto_tells_the_forms_apart() -> None:
    assert form_of(lambda solution_str, **kwargs: None, "auto").name == "verl"
    assert form_of(lambda data_sources, solution_strs: None, "auto").name == "verl"
    assert form_of(lambda queries, prompts, labels, **kwargs: None, "auto").name == "openrlhf"
    assert form_of(lambda completions, **kwargs: None, "auto").name == "trl"
    assert form_of(lambda completion_ids, **kwargs: None, "auto").name == "trl"


@pytest.mark.parametrize(
    "function",
    [
        lambda prompts, **kwargs: None,
        lambda **kwargs: None,
        lambda queries, completions: None,
        lambda solution_str, completions: None,
    ],
    ids=["neither", "nothing", "both", "verl-too"],
)
def test_an_ambiguous_function_needs_the_form_said(function: Any) -> None:
    with pytest.raises(FunctionFaultError, match="set form to 'trl', 'openrlhf' or 'verl'"):
        form_of(function, "auto")


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(FunctionFaultError, match="name a function"):
        form_of(3, "auto")


def test_a_column_that_the_data_lacks_is_named() -> None:
    with pytest.raises(FunctionFaultError, match=r"needs \['truth'\].*columns \['level'\]"):
        seen_by(lambda completions, truth: None, row("a", level=1))


def test_a_column_named_like_an_argument_is_refused() -> None:
    with pytest.raises(FunctionFaultError, match=r"\['trainer_state'\]"):
        seen_by(lambda completions, **kwargs: None, row("a", trainer_state=1))


def test_logged_values_become_metrics() -> None:
    batch = Batch([row("a"), row("b")], None)
    batch.log_metric("found", 1)
    batch.log_metric("found", 2)
    batch.log_extra("length", [3, None])
    assert batch.metrics == {"found": [1.0, 2.0], "length": [3.0]}
    with pytest.raises(FunctionFaultError, match="nan"):
        batch.log_metric("found", float("nan"))


def test_a_logged_text_is_said_not_to_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    batch = Batch([row("a")], None)
    batch.log_extra("reason", ["because"])
    assert batch.metrics == {}
    assert "'reason' is no column of numbers" in capsys.readouterr().out


PICTURE = noise(width=6, height=4)
URL = data_url(png(PICTURE))


def with_images(completion: str, *urls: str, **metadata: Any) -> dict[str, Any]:
    return {**row(completion, **metadata), "images": urls}


def test_a_trl_function_gets_images_as_pillow_has_them() -> None:
    def function(completions: Any, images: Any, level: Any = None, **kwargs: Any) -> Any:
        return images, level, kwargs

    (one, none, two), level, further = seen_by(
        function, with_images("a", URL, level=1), with_images("b"), with_images("c", URL, URL)
    )
    assert level == [1, None, None]
    assert "images" not in further
    assert none == []
    assert len(two) == 2
    for image in (*one, *two):
        assert np.array_equal(np.asarray(image.convert("RGB")), PICTURE)


def test_images_of_a_trl_function_are_turned_as_exif_says() -> None:
    def function(completions: Any, images: Any) -> Any:
        return images

    turned = Image.Exif()
    turned[0x0112] = 6  # shown a quarter turn clockwise
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, "PNG", exif=turned)
    ((image,),) = seen_by(function, with_images("a", data_url(file.getvalue())))
    assert np.array_equal(np.asarray(image), np.rot90(PICTURE, -1))


def test_functions_of_other_forms_get_images_as_data_urls() -> None:
    def openrlhf(queries: Any, prompts: Any, labels: Any, images: Any = None) -> Any:
        return queries, images

    def verl(solution_str: str, images: Any) -> Any:
        return solution_str, images

    def verl_batch(solution_strs: Any, images: Any = None) -> Any:
        return solution_strs, images

    rows = [with_images("a", URL), with_images("b")]
    assert seen_by(openrlhf, *rows) == (["<user>hia</s>", "<user>hib</s>"], [[URL], []])
    assert seen_by(verl, *rows) == [("a", [URL]), ("b", [])]
    assert seen_by(verl_batch, *rows) == (["a", "b"], [[URL], []])
    assert seen_by(openrlhf, row("a"))[1] is None
    assert seen_by(verl_batch, row("a"))[1] is None
    with pytest.raises(FunctionFaultError, match="needs 'images', but the data has none; give"):
        seen_by(verl, row("a"))


def test_functions_without_the_parameter_are_called_as_before() -> None:
    def trl(completions: Any, **kwargs: Any) -> Any:
        return sorted(kwargs)

    def openrlhf(queries: Any, prompts: Any, images: Any) -> Any:
        return images

    def verl(solution_str: str, **kwargs: Any) -> Any:
        return sorted(kwargs)

    for function in (trl, openrlhf, verl):
        assert not form_of(function, "auto").takes_images
        seen = seen_by(function, with_images("a", URL))
        assert seen == seen_by(function, row("a")), function.__name__


def test_a_trl_function_that_needs_images_says_so_where_the_data_has_none() -> None:
    def function(completions: Any, images: Any) -> Any:
        return images

    with pytest.raises(FunctionFaultError, match=r"needs \['images'\]"):
        seen_by(function, row("a"))
