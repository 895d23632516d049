"""Episodes over chat turns, token by token against the template on the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.scripted_sampler import ScriptedBackend
from support.tiny_models import tiny_tokenizer
from transformers import AutoTokenizer

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import EnvironmentFailedError, Observation
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.specs import PythonEnvironmentSpec, SamplingSpec

SMOLLM2 = Path(__file__).resolve().parents[4] / ".models/SmolLM2-135M-Instruct"
TURN = 22
"""Tokens of a turn that its limit cuts."""
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]

TOLD = '''
from rolemesh.engine.environments.base import Environment, Observation

class Told(Environment):
    """Says what the recipe tells it, one entry for each turn; {end} and {text} are the turn's."""

    stop = ("STOP",)

    def __init__(self, says):
        self.says = iter(says)

    def reset(self, row):
        pass

    def step(self, completion_text, end):
        said = next(self.says, None)
        if said is None:
            return Observation(reward=1.0, done=True)
        if not isinstance(said, list):
            return Observation(messages=said)
        filled = [
            {**m, "content": m["content"].format(end=end, text=completion_text)}
            if isinstance(m, dict) and isinstance(m.get("content"), str) else m
            for m in said
        ]
        return Observation(messages=filled)

class AnyKey(Told):
    def step(self, completion_text, reason="old"):
        return Observation(messages=[{"role": "user", "content": reason}], done=False)
'''

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|pad|>{{ m['role'] + '\n\n' + m['content'] | trim }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|pad|>assistant\n\n{% endif %}"
)
"""A header of its own kind, no line break behind a turn, contents trimmed."""

SPACED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' }}"
    "<|im_end|>{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""As Llama 2: a space before the end token, which the policy need not write."""

NEXT_SPEAKER = (
    "{% for m in messages %}{{ ('<|im_start|>' if m['role'] == 'user' else '<|pad|>') + '\n' "
    "+ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|pad|>{{ '\n' }}{% endif %}"
)
"""As GLM: nothing ends a turn but the token that opens the next one."""

THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n</think>\n' }}"
    "{% endif %}{{ m['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3: leaves out what was thought before the last question, and adds an empty thought."""


def tokenizer_of(kind: str) -> Any:
    if kind == "smollm2":
        if not SMOLLM2.is_dir():
            pytest.skip("no model: `make model` prepares it")
        return AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)
    tokenizer = tiny_tokenizer()
    templates = {"llama3": LLAMA3, "spaced": SPACED, "next": NEXT_SPEAKER, "thinking": THINKING}
    tokenizer.chat_template = templates.get(kind, tokenizer.chat_template)
    return tokenizer


def play(
    folder: Path,
    tokenizer: Any,
    turns: Sequence[str | list[int]],
    says: Sequence[Any],
    *,
    name: str = "Told",
    max_new_tokens: int = 400,
    **bounds: Any,
) -> tuple[Any, list[int], list[int]]:
    """The batch, the prompt's tokens and those of the completion; a turn in text is encoded."""
    (folder / "told.py").write_text(TOLD)
    text = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    said = iter(turns)

    def script(request: RolloutRequest) -> list[int]:
        turn = next(said)
        tokens: list[int] = turn if isinstance(turn, list) else encoded(tokenizer, turn)
        return tokens[: request.max_new_tokens]

    def reason(request: RolloutRequest, tokens: Sequence[int]) -> Any:
        is_cut = len(tokens) == request.max_new_tokens
        return "length" if is_cut else "stop"

    batch = sample_experience(
        ScriptedBackend(script, reason=reason),
        [Prompt(prompt_id=0, text=text, tokens=prompt, answer="7", metadata="{}")],
        SamplingSpec(max_new_tokens=max_new_tokens),
        run_seed=1,
        step=1,
        tokenizer=tokenizer,
        progress=lambda *_: None,
        episodes=EpisodeRunner(
            PythonEnvironmentSpec(
                environment=f"{folder / 'told.py'}:{name}", config={"says": list(says)}, **bounds
            ),
            tokenizer,
            2048,
        ),
    )
    return batch, prompt, batch["tokens"].values.tolist()[len(prompt) :]


def encoded(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def whole(tokenizer: Any, conversation: Sequence[Any]) -> list[int]:
    """Tokens of the template on the whole conversation, up to the last end of a turn."""
    tokens: list[int] = tokenizer.apply_chat_template(
        [*PROMPT, *conversation], tokenize=True, return_dict=False
    )
    return tokens


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("kind", ["tiny", "smollm2", "llama3"])
def test_a_row_is_the_template_on_the_whole_conversation(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    end = tokenizer.convert_ids_to_tokens(2)
    assert end == "<|im_end|>"
    says = [[user("no, more")], [tool("84"), user("it was {end}")], [user("so?")]]
    # The first turn is closed by the policy; a stop text ends the second, its limit the third.
    third = encoded(tokenizer, "one two three four five six seven eight nine ten " * 3)[:TURN]
    turns = [f"I say 3{end}", "ask the tool STOP", [*third, *third], f"42{end}"]
    batch, prompt, completion = play(tmp_path, tokenizer, turns, says, max_turn_tokens=TURN)
    conversation = [
        assistant("I say 3"),
        user("no, more"),
        assistant("ask the tool STOP"),
        tool("84"),
        user("it was stop_text"),
        assistant(tokenizer.decode(third)),
        user("so?"),
        assistant("42"),
    ]
    expected = whole(tokenizer, conversation)
    assert [*prompt, *completion] == expected[: len(prompt) + len(completion)]
    rest = tokenizer.decode(expected[len(prompt) + len(completion) :])
    assert rest == ("" if kind == "llama3" else "\n")
    sampled = [t for t, own in zip(completion, batch["loss_mask"].values, strict=True) if own]
    drawn = [*encoded(tokenizer, turns[0]), *encoded(tokenizer, turns[1]), *third]
    assert sampled == [*drawn, *encoded(tokenizer, turns[3])]
    assert (batch["logprobs"].values != 0).tolist() == batch["loss_mask"].values.tolist()
    assert batch["finished"].values.tolist() == [True]
    assert completion.count(2) == 4 + 4, "each of 4 turns and 4 messages is closed once"


CHATML = "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("kind", "closed_by", "between"),
    [
        ("tiny", "<|im_end|>", f"\n{CHATML}"),
        ("tiny", None, f"<|im_end|>\n{CHATML}"),
        # Another end token of the model stands in place of the template's.
        ("tiny", "<|unk|>", f"\n{CHATML}"),
        ("spaced", "<|im_end|>", "[INST] no [/INST]"),
        ("spaced", None, " <|im_end|>[INST] no [/INST]"),
        ("next", "<|im_start|>", "\nno<|pad|>\n"),
        ("next", None, "<|im_start|>\nno<|pad|>\n"),
        # What was thought stays, and no empty thought is added to it.
        ("thinking", "<|im_end|>", f"\n{CHATML}"),
    ],
)
def test_a_turn_is_closed_once_whatever_the_template_closes_it_with(
    kind: str, closed_by: str | None, between: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(kind)
    first, last = "<think>hm</think> " + ("" if closed_by else "STOP"), "yes<|im_end|>"
    _, _, completion = play(tmp_path, tokenizer, [first + (closed_by or ""), last], [[user("no")]])
    assert tokenizer.decode(completion) == f"{first}{closed_by or ''}{between}{last}"


def test_a_step_of_one_parameter_works_as_before(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("tiny")
    turns = ["a<|im_end|>", "b<|im_end|>"]
    _, _, completion = play(tmp_path, tokenizer, turns, [], name="AnyKey", max_turns=2)
    expected = whole(tokenizer, [assistant("a"), user("old"), assistant("b")])
    assert completion == expected[-len(completion) - 1 : -1]


def test_contents_are_shortened_and_markers_of_turns_are_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("tiny")
    says = [[tool("123456"), user("78\N{EURO SIGN}"), user("90")]]
    turns = ["a<|im_end|>", "b<|im_end|>"]
    _, _, completion = play(tmp_path, tokenizer, turns, says, max_observation_tokens=9)
    # 6 digits, 2 digits, the first byte of three; nothing is left for the last one.
    expected = [assistant("a"), tool("123456"), user("78"), user(""), assistant("b")]
    assert completion == whole(tokenizer, expected)[-len(completion) - 1 : -1]


def test_messages_that_leave_no_room_for_a_turn_end_the_row_as_cut(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("tiny")
    between = len(encoded(tokenizer, f"\n{CHATML}"))
    for room, texts in ((0, "a<|im_end|>"), (1, f"a<|im_end|>\n{CHATML}7")):
        turns = ["a<|im_end|>", "777"]
        batch, _, completion = play(
            tmp_path, tokenizer, turns, [[user("no")]], max_new_tokens=2 + between + room
        )
        assert tokenizer.decode(completion) == texts
        assert batch["finished"].values.tolist() == [False]


def test_a_turn_that_the_budget_cuts_is_the_last_and_one_that_its_limit_cuts_is_not(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_of("tiny")
    says = [[user("{end}: {text}")]]
    for budget, turns in ((400, ["12345678", "ok<|im_end|>"]), (4, ["12345678"])):
        batch, _, completion = play(
            tmp_path, tokenizer, turns, says, max_new_tokens=budget, max_turn_tokens=4
        )
        text = tokenizer.decode(completion)
        assert text.startswith("1234")
        assert ("user\nlength: 1234<|im_end|>" in text) == (budget == 400)
        assert batch["finished"].values.tolist() == [budget == 400]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ m['role'] }} {{ loop.index }}: {{ m['content'] }}", "depends on how many turns stand"),
        ("{{ m['role'] }}: {{ m['content'] | upper }}", "does not contain the answer before it"),
        (
            "{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{{ m['content'] }}",
            r"refuses its turns \(user, assistant, tool\): no tools",
        ),
    ],
    ids=["counts", "changes", "refuses"],
)
def test_a_template_that_has_no_continuation_is_refused(
    template: str, message: str, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{template}<|im_end|>{{% endfor %}}"
    with pytest.raises(EnvironmentFailedError, match=rf"prompt 0, row 0, turn 1: .*{message}"):
        play(tmp_path, tokenizer, ["a<|im_end|>"], [[tool("84")]])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([assistant("I am the policy")], "has the role 'assistant': only the policy speaks"),
        ([{"role": "user"}], "a message of the observation is .*role.*: give"),
        ([{"role": "user", "content": 3}], "give .* with texts"),
        (["hello"], "a message of the observation is .*hello"),
        ("hello", "messages of the observation is a str"),
        (5, "messages of the observation is a int"),
    ],
)
def test_messages_that_are_none_are_refused(said: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailedError, match=message):
        play(tmp_path, tokenizer_of("tiny"), ["a<|im_end|>"], [said])


def test_text_and_messages_together_are_refused() -> None:
    with pytest.raises(ValueError, match="the observation has text and messages: give one"):
        Observation(text="!", messages=[user("no")])
    with pytest.raises(TypeError, match="JSON serializable"):
        Observation(messages=[{**user("no"), "extra": object()}])
