"""Episodes on a scripted sampler: every token, mask, log-prob and seed by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.scripted_sampler import AsciiTokenizer, Reason, ScriptedBackend, number_prompts
from support.services import assert_same
from support.tiny_models import tiny_tokenizer

from rolemesh.engine.data.prompts import Prompt, load_prompts
from rolemesh.engine.environments.base import Environment, EnvironmentFailedError, Observation
from rolemesh.engine.experience import Experience
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.rewards.sources import ReasoningGymReward
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.sampling import sample_experience, sampling_metrics
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import (
    CalculatorEnvironmentSpec,
    EnvironmentSpec,
    PythonEnvironmentSpec,
    ReasoningGymEnvironmentSpec,
    ReasoningGymSpec,
    SamplingSpec,
)

RUN_SEED, STEP, MAX_MODEL_LEN = 11, 4, 400
CALCULATOR = CalculatorEnvironmentSpec()


def spoken(replies: Callable[[str], str]) -> Callable[[RolloutRequest], list[int]]:
    """A policy that says, to all that was said before, what `replies` gives, within its budget."""

    def script(request: RolloutRequest) -> list[int]:
        said = replies("".join(map(chr, request.prompt_tokens)))
        return [ord(character) for character in said][: request.max_new_tokens]

    return script


def cut_by_budget(request: RolloutRequest, tokens: Sequence[int]) -> Reason:
    return "length" if len(tokens) == request.max_new_tokens else "stop"


def prompt(text: str, answer: str = "", prompt_id: int = 7) -> Prompt:
    tokens = [ord(character) for character in text]
    return Prompt(prompt_id=prompt_id, text=text, tokens=tokens, answer=answer, metadata="{}")


def play(
    spec: EnvironmentSpec,
    backend: ScriptedBackend,
    prompts: Sequence[Prompt],
    *,
    samples: int = 1,
    max_new_tokens: int = 300,
    max_model_len: int = MAX_MODEL_LEN,
    **options: Any,
) -> Experience:
    return sample_experience(
        backend,
        prompts,
        SamplingSpec(samples_per_prompt=samples, max_new_tokens=max_new_tokens),
        run_seed=RUN_SEED,
        step=STEP,
        tokenizer=AsciiTokenizer(),
        progress=lambda *_: None,
        episodes=EpisodeRunner(spec, AsciiTokenizer(), max_model_len),
        **options,
    )


def scripted(replies: Mapping[str, str] | Callable[[str], str]) -> ScriptedBackend:
    """Replies by what the sequence so far ends with."""

    def reply(so_far: str) -> str:
        if callable(replies):
            return replies(so_far)
        (found,) = [said for end, said in replies.items() if so_far.endswith(end)]
        return found

    return ScriptedBackend(spoken(reply), reason=cut_by_budget)


# --- the calculator -------------------------------------------------------------------------


def test_tool_output_is_masked_and_everything_sampled_stays_as_it_was_drawn() -> None:
    backend = scripted(
        {
            "Q:": "12*7 is <calc>12*7</calc> which I guess is 99",
            "84</result>": "<calc>84+7</calc>",
            "91</result>": " So it is 91.",
        }
    )
    batch = play(CALCULATOR, backend, [prompt("Q:", "91")])
    parts = [
        ("12*7 is <calc>12*7</calc>", True),
        ("<result>84</result>", False),
        ("<calc>84+7</calc>", True),
        ("<result>91</result>", False),
        (" So it is 91.", True),
    ]
    text = "".join(part for part, _ in parts)
    tokens = [ord(character) for character in text]
    mask = [is_sampled for part, is_sampled in parts for _ in part]
    assert batch["completion_text"].strings() == [text]
    assert batch["tokens"].values.tolist() == [*map(ord, "Q:"), *tokens]
    assert batch["loss_mask"].values.tolist() == mask
    assert batch["logprobs"].values.tolist() == [
        -float(token) if sampled else 0.0 for token, sampled in zip(tokens, mask, strict=True)
    ]
    assert batch["policy_versions"].values.tolist() == [3] * len(tokens)
    assert batch["environment_rewards"].values.tolist() == [1.0]
    assert batch["environment_rewards"].values.dtype == torch.float32
    assert batch["finished"].values.tolist() == [True]
    # Each turn was sampled behind all that stands before it, with a seed and a budget of its own.
    turns = [turn for call in backend.calls for turn in call]
    ends = [0, len(parts[0][0] + parts[1][0]), len("".join(part for part, _ in parts[:4]))]
    assert [list(turn.prompt_tokens) for turn in turns] == [
        [*map(ord, "Q:"), *tokens[:end]] for end in ends
    ]
    assert [turn.max_new_tokens for turn in turns] == [300 - end for end in ends]
    seed = derive_seed(RUN_SEED, STEP, 7, 0)
    assert [turn.seed for turn in turns] == [seed, derive_seed(seed, 1), derive_seed(seed, 2)]


@pytest.mark.parametrize(
    ("answer", "last", "reward"),
    [("91", "91", 1.0), ("91", "so 90 or 91.0!", 1.0), ("91", "91, not 90", 0.0), ("91", "", 0.0)],
)
def test_a_turn_without_a_call_is_judged_by_its_last_number(
    answer: str, last: str, reward: float
) -> None:
    backend = ScriptedBackend(lambda request: [ord(c) for c in last + " "], reason=cut_by_budget)
    batch = play(CALCULATOR, backend, [prompt("Q:", answer)])
    assert batch["environment_rewards"].values.tolist() == [reward]


def test_a_call_that_is_no_arithmetic_is_told_so() -> None:
    backend = scripted({"Q:": "<calc>import os</calc>", "</result>": "5"})
    batch = play(CALCULATOR, backend, [prompt("Q:", "5")])
    assert batch["completion_text"].strings() == [
        "<calc>import os</calc><result>error: not an expression</result>5"
    ]
    assert batch["environment_rewards"].values.tolist() == [1.0]


def test_a_call_that_the_prompt_has_begun_is_ended_by_the_first_turn_alone() -> None:
    begun = "2*3 = <calc>2*3</calc><result>6</result> 6\n4*5 = <calc>"
    backend = scripted({"4*5 = <calc>": "4*5</calc>", "20</result>": "</calc> so 20"})
    batch = play(CALCULATOR, backend, [prompt(begun, "20")])
    # The second turn is cut at a closing tag that opens nothing: no call, so it is judged.
    assert batch["completion_text"].strings() == ["4*5</calc><result>20</result></calc>"]
    assert batch["environment_rewards"].values.tolist() == [0.0]
    ended = scripted({begun[:-6]: "20"})
    assert play(CALCULATOR, ended, [prompt(begun[:-6], "20")])["environment_rewards"].values == 1.0


def test_data_without_numbers_to_judge_by_is_refused() -> None:
    with pytest.raises(EnvironmentFailedError, match=r"prompt 7, row 0, turn 0: .*'cat', which"):
        play(CALCULATOR, scripted({}), [prompt("Q:", "cat")])


# --- bounds ---------------------------------------------------------------------------------


def test_an_episode_ends_after_its_turns() -> None:
    spec = CalculatorEnvironmentSpec(max_turns=2)
    backend = scripted(lambda so_far: "<calc>1</calc>")
    batch = play(spec, backend, [prompt("Q:", "1")])
    assert batch["completion_text"].strings() == ["<calc>1</calc><result>1</result><calc>1</calc>"]
    assert batch["finished"].values.tolist() == [True]
    assert batch["environment_rewards"].values.tolist() == [0.0]


CALL, RESULT = "<calc>1</calc>", "<result>1</result>"


@pytest.mark.parametrize(
    ("budget", "completion", "is_finished"),
    [
        # The last turn is cut.
        (len(CALL + RESULT) + 1, f"{CALL}{RESULT}1", False),
        # No token could follow the result: it is left out.
        (len(CALL + RESULT), CALL, False),
        # The call itself is cut, which the calculator then judges as an answer.
        (len(CALL) - 1, CALL[:-1], False),
        (len(CALL + RESULT) + 8, f"{CALL}{RESULT}1 makes.", False),
        (len(CALL + RESULT) + 9, f"{CALL}{RESULT}1 makes.", True),
    ],
)
@pytest.mark.parametrize("bound", ["max_new_tokens", "max_model_len"])
def test_the_budget_counts_tool_output_too(
    budget: int, completion: str, is_finished: bool, bound: str
) -> None:
    backend = scripted(lambda so_far: "1 makes." if so_far.endswith("</result>") else CALL)
    limits = {"max_new_tokens": budget} if bound == "max_new_tokens" else {}
    if bound == "max_model_len":
        limits = {"max_model_len": len("Q:") + budget}
    batch = play(CALCULATOR, backend, [prompt("Q:", "1")], **limits)  # type: ignore[arg-type]
    assert batch["completion_text"].strings() == [completion]
    assert batch["finished"].values.tolist() == [is_finished]


def test_an_observation_keeps_its_first_tokens() -> None:
    spec = CalculatorEnvironmentSpec(max_observation_tokens=10)
    backend = scripted({"Q:": CALL, "<result>1<": "1"})
    batch = play(spec, backend, [prompt("Q:", "1")])
    assert batch["completion_text"].strings() == [f"{CALL}<result>1<1"]


# --- own environments -----------------------------------------------------------------------

ECHO = '''
from rolemesh.engine.environments.base import Environment, Observation

class Echo(Environment):
    """Says each turn back; a turn "end" is the last one."""

    def __init__(self, greeting=""):
        self.greeting = greeting
        self.turns = 0

    def reset(self, row):
        return self.greeting or None

    def step(self, completion_text):
        self.turns += 1
        return Observation(text=f"[{completion_text}]", reward=0.5, done=completion_text == "end")

class Broken(Echo):
    def step(self, completion_text):
        return {"x": 1 / 0}

class Silent(Echo):
    def step(self, completion_text):
        return None

class Infinite(Echo):
    def step(self, completion_text):
        return Observation(reward=float("nan"))

class OneStop(Echo):
    stop = "!"

class NumberStop(Echo):
    stop = (3,)

class NoStop(Echo):
    stop = None

class Fragile(Echo):
    """Is made when it is tried, and no more."""

    made = 0

    def __init__(self):
        super().__init__()
        Fragile.made += 1
        if Fragile.made > 1:
            raise ConnectionError("no sandbox is left")

class Leaving(Echo):
    def step(self, completion_text):
        raise SystemExit(3)

NOT_ONE = 5
'''


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., PythonEnvironmentSpec]:
    path = tmp_path / "own.py"
    path.write_text(ECHO)

    def spec(name: str, **options: Any) -> PythonEnvironmentSpec:
        return PythonEnvironmentSpec(environment=f"{path}:{name}", **options)

    return spec


def test_text_of_reset_stands_before_the_first_turn_masked(own: Any) -> None:
    backend = scripted({"Q:hi ": "yes", "[yes]": "end"})
    batch = play(own("Echo", config={"greeting": "hi "}), backend, [prompt("Q:")])
    assert batch["completion_text"].strings() == ["hi yes[yes]end"]
    assert batch["loss_mask"].values.tolist() == [0] * 3 + [1] * 3 + [0] * 5 + [1] * 3
    assert batch["environment_rewards"].values.tolist() == [1.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "Broken",
            {},
            r"Broken failed for prompt 7, row 0, turn 0: ZeroDivisionError.* "
            r"\(at .*own\.py:\d+, in step\)",
        ),
        ("Silent", {}, "step gave a NoneType: return an Observation"),
        ("Infinite", {}, "reward of the observation is nan: every reward must be finite"),
        ("OneStop", {}, "stop is '!': give a tuple of texts"),
        ("NumberStop", {}, r"stop is \(3,\): give a tuple of texts"),
        ("NoStop", {}, "NoStop failed for prompt 7, row 0, turn 0: stop is None: give a tuple"),
        ("Fragile", {}, "prompt 7, row 0, turn 0: ConnectionError.*no sandbox is left"),
        ("Leaving", {}, r"Leaving failed for prompt 7, row 0, turn 0: SystemExit\(3\)"),
        ("Echo", {"config": {"greeting": "x" * 64}}, "leaves no room for a turn within 60 tokens"),
        ("Echo", {"config": {"greeting": 3}}, "reset gave a int: return text, or None"),
    ],
)
def test_an_environment_that_fails_is_named_with_the_row(
    own: Any, name: str, options: dict[str, Any], message: str
) -> None:
    backend = scripted(lambda so_far: "yes")
    with pytest.raises(EnvironmentFailedError, match=message):
        play(own(name, **options), backend, [prompt("Q:")], max_new_tokens=60)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/own.py:Echo", "cannot be loaded .*is no file"),
        ("no_such_package:Echo", "cannot be loaded .*ModuleNotFoundError"),
        ("Echo", "give 'path/to/file.py:name'"),
        ("{own}:NoSuch", "has no 'NoSuch'"),
        ("{own}:NOT_ONE", "is no subclass of"),
        ("{own}:Observation", "is no subclass of"),
        ("{own}:Environment", "cannot be made with it"),
    ],
)
def test_a_class_that_cannot_be_used_is_told_at_once(
    own: Any, tmp_path: Path, name: str, message: str
) -> None:
    own("Echo")
    spec = PythonEnvironmentSpec(environment=name.format(own=tmp_path / "own.py"))
    with pytest.raises(UserCodeError, match=message):
        EpisodeRunner(spec, AsciiTokenizer(), MAX_MODEL_LEN)


def test_config_that_the_class_does_not_take_is_told_at_once(own: Any) -> None:
    with pytest.raises(UserCodeError, match=r"environment.config is .*greetings"):
        EpisodeRunner(own("Echo", config={"greetings": ""}), AsciiTokenizer(), MAX_MODEL_LEN)


# --- order ----------------------------------------------------------------------------------


def test_results_and_requests_do_not_depend_on_who_finishes_first(own: Any) -> None:
    def reply(request: RolloutRequest) -> list[int]:
        said = "end" if request.seed % 3 == 0 else f"<{request.seed % 1000}>"
        return [ord(character) for character in said][: request.max_new_tokens]

    prompts = number_prompts().slice("train", 0, 5)
    expected: Experience | None = None
    for seed in range(10):

        def order(requests: Sequence[RolloutRequest], seed: int = seed) -> Sequence[RolloutRequest]:
            return random.Random(seed).sample(requests, len(requests))

        backend = ScriptedBackend(reply, order, cut_by_budget)
        blocks: dict[int, Experience] = {}
        batch = play(
            own("Echo", max_turns=6),
            backend,
            prompts,
            samples=3,
            block_rows=6,
            on_block=blocks.__setitem__,
        )
        for calls in backend.calls:
            assert [r.row for r in calls] == sorted(r.row for r in calls)
        expected = expected or batch
        assert_same(batch, expected)
        assert_same(Experience.concat([blocks[0], blocks[1], blocks[2]]), expected)
    assert expected is not None
    turns = [text.count("[") + 1 for text in expected["completion_text"].strings()]
    assert len(set(turns)) > 2, "rows have different numbers of turns"


def test_a_back_end_that_forgets_a_turn_is_an_error(own: Any) -> None:
    backend = ScriptedBackend(order=lambda requests: requests[1:], reason=cut_by_budget)
    with pytest.raises(RuntimeError, match=r"has left 4 turns unfinished: rows \[0, 1, 2, 3\]"):
        play(own("Echo"), backend, number_prompts().slice("train", 0, 4))


# --- reasoning-gym --------------------------------------------------------------------------


def test_a_reasoning_gym_task_runs_unmodified_and_as_without_an_environment() -> None:
    tokenizer = tiny_tokenizer()
    prompts = load_prompts(
        ReasoningGymSpec(task="chain_sum", train_size=12, held_out_size=0, seed=3),
        tokenizer=tokenizer,
        seed=1,
    ).slice("train", 0, 12)
    answers = {tuple(p.tokens): p.answer for p in prompts}

    def reply(request: RolloutRequest) -> list[int]:
        right = answers[tuple(request.prompt_tokens)]
        text = (right, f"It is {right}", "no idea")[request.seed % 3]
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def sample(episodes: EpisodeRunner | None) -> Experience:
        return sample_experience(
            ScriptedBackend(reply),
            prompts,
            SamplingSpec(samples_per_prompt=3, max_new_tokens=64),
            run_seed=RUN_SEED,
            step=STEP,
            tokenizer=tokenizer,
            progress=lambda *_: None,
            episodes=episodes,
        )

    plain = sample(None)
    played = sample(EpisodeRunner(ReasoningGymEnvironmentSpec(), tokenizer, 4096))
    rewards = played["environment_rewards"].values
    assert_same(played.require(list(plain.columns)), plain)
    assert torch.equal(rewards, ReasoningGymReward().score(plain, lambda *_: None))
    assert len(set(rewards.tolist())) > 1, "some are right and some are wrong"


# --- cuts -----------------------------------------------------------------------------------


class Stops(Environment):
    """Only its stop texts matter here."""

    stop: ClassVar[tuple[str, ...]] = ("</calc>", "ab")

    def reset(self, row: Prompt) -> None:
        pass

    def step(self, completion_text: str) -> Observation:
        return Observation(done=True)


def test_a_turn_is_cut_behind_the_first_token_that_completes_a_stop_text() -> None:
    tokenizer = tiny_tokenizer()
    runner = EpisodeRunner(ReasoningGymEnvironmentSpec(), tokenizer, 4096)
    draw = random.Random(3)
    pieces = ["</calc>", "</ca", "lc>", "ab", "a", "b", "x", "\u00e4", "</calc", "<", ">", "\u20ac"]
    num_cut = 0
    for _ in range(400):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        # Tokens as a model may draw them, not only as the tokenizer would write them.
        if draw.random() < 0.5:
            tokens = [token for c in text for token in tokenizer(c)["input_ids"]]
        if draw.random() < 0.3:
            tokens.insert(draw.randint(0, len(tokens)), tokenizer.eos_token_id)
        ends = [
            length
            for length in range(1, len(tokens) + 1)
            if any(
                s in tokenizer.decode(tokens[:length], skip_special_tokens=True) for s in Stops.stop
            )
        ]
        expected = ends[0] if ends else None
        assert runner.texts.turn_end(tokens, Stops.stop) == expected, (text, tokens)
        # What a back end is given says so at the same token.
        is_complete = runner.texts.stop_check(Stops.stop)
        assert is_complete is not None
        told = [n for n in range(1, len(tokens) + 1) if is_complete(tokens[:n])]
        assert (told[0] if told else None) == expected
        num_cut += expected is not None
    assert 100 < num_cut < 399


def test_metrics_leave_out_log_probs_of_tokens_that_were_not_sampled() -> None:
    backend = scripted({"Q:": CALL, "</result>": "1"})
    batch = play(CALCULATOR, backend, [prompt("Q:", "1")])
    sampled = [ord(character) for character in CALL + "1"]
    metrics = sampling_metrics(batch)
    assert metrics["sampler_logprob/mean"] == pytest.approx(-sum(sampled) / len(sampled))
    assert metrics["completion_length/mean"] == len(CALL + RESULT + "1")
