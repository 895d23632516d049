"""Tests of Tinker's SDK against `rolemesh tinker`, with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from support.client_programs import run, seen
from support.mesh_runs import tiny_model
from support.served_tinker import served_tinker
from support.tinker_calls import BY_THE_SDK, CALLED, called_by, is_unserved, named

pytestmark = pytest.mark.clients

ROLLOUT = {"type": "hf", "max_model_len": 256}

ROUNDING = 1e-4
"""How far sums of float32 terms may be from each other that are added in another order. 2e-6 was
seen."""

QUICK_S = 5.0
"""A call that is not served fails within this; 0.2 s were seen. The SDK asks again for five minutes
where it takes an error for a passing one."""


class Tinker:
    """The server, and where programs run: beside a folder that has the base's name."""

    def __init__(self, variables: dict[str, str], folder: Path) -> None:
        self.variables = variables
        self.folder = folder

    def saw(
        self, what: str, *arguments: str, client: str = "tinker", **variables: str
    ) -> dict[str, Any]:
        """What a program saw; it has called what the table says."""
        program, _, name = what.partition(" ")
        saw: dict[str, Any] = seen(
            client,
            f"tinker_{program}.py",
            name,
            *arguments,
            variables={**self.variables, **variables},
            folder=self.folder,
        )
        called = set(saw.pop("called"))
        missed = called_by(what) - called if what in CALLED else set()
        assert not missed, f"{what} has not called {sorted(missed)}"
        return saw


@pytest.fixture(scope="module")
def tinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tinker]:
    """A tiny base."""
    folder = tmp_path_factory.mktemp("tinker")
    model = tiny_model(folder / "tiny")
    with served_tinker(folder, model, rollout=ROLLOUT, compute_dtype="float32") as variables:
        yield Tinker(variables, folder)


def test_the_table_names_each_public_method() -> None:
    methods = set(seen("tinker", "tinker_methods.py"))
    named_by_twin = {name for name in methods if is_unserved(name)}
    assert methods == named() | named_by_twin
    assert not {name for what in CALLED for name in called_by(what)} & {*BY_THE_SDK, *named_by_twin}


def test_a_supervised_loop_learns_its_texts(tinker: Tinker) -> None:
    saw = tinker.saw("training supervised")
    first, last = (loss / saw["num_tokens"] for loss in (saw["losses"][0], saw["losses"][-1]))
    # 6.8 to 0.15 nats a token. It begins near the uniform log 512 = 6.2; a model that knew nothing
    # of these 16 tokens would give them all 0.37 each with a probability of 512 to the minus 16.
    assert 5 < first < 9
    assert last < 1
    assert all(a > b for a, b in zip(saw["losses"], saw["losses"][1:], strict=False))
    assert saw["info"] == ["tiny", True, 4]
    assert saw["tokenizer"]
    assert saw["telemetry"]


def test_losses_are_what_their_formulas_say(tinker: Tinker) -> None:
    for name, (reported, computed) in tinker.saw("training losses").items():
        assert reported == pytest.approx(computed, abs=ROUNDING), name


def test_training_goes_on_from_saved_weights_bit_for_bit(tinker: Tinker) -> None:
    saw = tinker.saw("training resumed")
    for name in ("found", "fresh_found", "loaded_fresh"):
        assert saw[name] == saw["saved"], name
    for name in ("resumed", "loaded"):
        assert saw[name] == saw["went_on"], name
    # With no memory of earlier gradients its steps are others.
    assert saw["fresh"] != saw["went_on"]


def test_training_with_an_event_loop_does_the_same(tinker: Tinker) -> None:
    saw = tinker.saw("training asynchronous")
    assert saw["loss"] == pytest.approx(-sum(map(sum, saw["first"])), abs=ROUNDING)
    assert saw["scores"] != saw["first"]
    assert saw["again"] == [saw["scores"]] * 3
    assert saw["rank"] == 4


def test_a_loss_of_the_clients_own_is_learned(tinker: Tinker) -> None:
    saw = tinker.saw("training custom", client="tinker_cookbook")
    # The sum of (p + 1) squared, over 16 tokens: from 549 to below 1.
    assert saw["losses"][0] > 100
    assert saw["losses"][-1] < 5
    again = sum((one + 1) ** 2 for row in saw["scores"] for one in row)
    assert saw["metric"] == pytest.approx(again, abs=ROUNDING)


def test_samples_come_from_the_weights_that_were_saved(tinker: Tinker) -> None:
    saw = tinker.saw("sampling samples")
    tokens = saw["tokens"]
    for name in ("unnamed", "path", "path_of_client", "state"):
        assert tokens[name] == tokens["named"], name
    # Of 24 tokens each, drawn from 512 with other weights.
    assert tokens["base"] != tokens["named"]
    assert saw["later"] != tokens["named"]
    # Two calls of four samples without a seed: that two are equal has a probability below 1e-20.
    assert len({tuple(one) for one in saw["unseeded"]}) == 8


def test_log_probs_of_prompts_are_those_of_samples(tinker: Tinker) -> None:
    saw = tinker.saw("sampling scores")
    computed = saw["computed"]
    assert computed[0] is None
    assert computed[4:] == pytest.approx(saw["sampled"], abs=ROUNDING)
    assert saw["prompt_logprobs"][1:] == pytest.approx(computed[1:], abs=ROUNDING)
    assert saw["last"][:-2] == [None] * (len(computed) - 2)
    assert saw["last"][-2:] == pytest.approx(computed[-2:], abs=ROUNDING)
    assert saw["top"][0] is None
    for place, logprob in zip(saw["top"][1:], computed[1:], strict=True):
        scores = [score for _, score in place]
        assert len(place) == 3
        assert scores == sorted(scores, reverse=True)
        is_among = any(abs(score - logprob) < ROUNDING for score in scores)
        assert is_among or scores[-1] >= logprob
    assert saw["greedy"] == saw["likeliest"]
    assert saw["stopped"] == [saw["greedy"][:3], "stop"]
    assert saw["reasons"] == ["length", "length"]


def test_sampling_clients_can_be_handed_on(tinker: Tinker) -> None:
    saw = tinker.saw("sampling handles")
    assert saw["bases"] == [saw["base"]] * 4
    assert saw["tokens"] == [saw["tokens"][0]] * 3
    # One seed and the same weights, whether the model in training has them or a sampler's place.
    assert saw["loaded"] == saw["tokens"][0]
    assert saw["text"]


def test_sampling_with_an_event_loop_does_the_same(tinker: Tinker) -> None:
    saw = tinker.saw("sampling asynchronous")
    # A model that was not trained yet samples as its base does.
    assert saw["tokens"] == [saw["tokens"][0]] * 4
    assert saw["num_samples"] == 48
    assert saw["scores"][0] is None
    assert saw["base"][0] == saw["base"][1]
    assert saw["future"] == saw["coroutine"] == "length"


def test_saved_weights_are_listed_published_and_removed(tinker: Tinker) -> None:
    saw = tinker.saw("weights lists")
    assert saw["models"] == [saw["base"]]
    state = ["weights/state", "training", False, False, True]
    sampler = ["sampler_weights/sampler", "sampler", False, True, True]
    assert saw["listed"] == [sampler, state]
    assert saw["public"] == [sampler, ["weights/state", "training", True, True, True]]
    assert saw["private"] == [sampler, state]
    assert saw["left"] == []
    assert saw["of_user"][:2] == saw["paths"][::-1]
    assert saw["one"] == saw["paths"][:1]
    assert saw["runs"][0] == saw["run"]
    assert saw["count"] >= 1
    assert saw["info"] == [saw["base"], True, 4]
    assert saw["found"] == [[saw["run"], 4, saw["paths"][0]]] * 2
    assert saw["metadata"] == {"of": "a test"}
    assert saw["sampler"] == saw["base"]


def test_saved_weights_with_an_event_loop_are_the_same(tinker: Tinker) -> None:
    saw = tinker.saw("weights asynchronous")
    assert saw["of_user"][:2] == saw["paths"][::-1]
    assert saw["found"] == [saw["run"]] * 2
    assert [entry[2] for entry in saw["listed"]] == [False, False]
    assert [entry[2] for entry in saw["public"]] == [False, True]
    assert saw["left"] == []


def test_sessions_copies_and_files_are_had_by_the_sdk(tinker: Tinker) -> None:
    saw = tinker.saw("weights sessions")
    runs, samplers, metadata = saw["told"]
    assert runs == [saw["run"]]
    assert samplers == [f"{saw['session']}:sample:0"]
    assert not metadata
    assert saw["session"] in saw["listed"]
    assert saw["found"] == [[saw["session"], "a-project", "active"]]
    assert saw["external"] == f"tinker://{saw['run']}/external_weights/files"
    assert saw["files"].keys() >= {"adapter_config.json", "adapter_model.safetensors"}
    assert saw["config"]["r"] == 4
    assert saw["loaded"] == [4, 4]


def test_sessions_with_an_event_loop_are_the_same(tinker: Tinker) -> None:
    saw = tinker.saw("weights sessions_asynchronous")
    assert saw["told"] == [saw["run"]]
    assert saw["session"] in saw["listed"]
    assert saw["external"] == f"tinker://{saw['run']}/external_weights/files"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(saw["files"])
    assert saw["copied"].endswith("/weights/state")


def test_a_loop_whose_actor_is_killed_ends_with_the_same_adapter(tinker: Tinker) -> None:
    folder = str(tinker.folder / "out")
    undisturbed = tinker.saw(f"killed {folder}")
    killed = tinker.saw(f"killed {folder}", "sample", "gradient")
    # Three processes have worked at it, and one at the other.
    assert (undisturbed.pop("num_actors"), killed.pop("num_actors")) == (1, 3)
    assert killed == undisturbed
    # Its weights have changed: all steps draw with the same seed.
    assert killed["samples"][:8] != killed["samples"][-8:]


def test_the_sdks_command_downloads_an_adapter(tinker: Tinker) -> None:
    state = tinker.saw("weights publish")["public"]
    folder = tinker.folder / "downloaded"
    run(
        *("tinker", "tinker", "checkpoint", "download", state, "--output", str(folder)),
        variables=tinker.variables,
        folder=tinker.folder,
    )
    (weights,) = folder.rglob("adapter_model.safetensors")
    matrices = safetensors.numpy.load_file(weights)
    assert {min(one.shape) for one in matrices.values()} == {4}


def test_errors_say_what_is_wrong_and_training_goes_on(tinker: Tinker) -> None:
    saw = tinker.saw("refusals errors")
    assert saw.pop("after") == ["grad_norm", "learning_rate"]
    expected = {
        "base": "base_model: other: this server has tiny",
        "rank": "lora_config.rank: 4096: this server takes 64 at most",
        "dimuon": "optimizer_config.type is 'dimuon': adamw is served",
        "long": "data.0.model_input: 999 tokens: the model takes 255: shorten it",
        "nan": "data.0.loss_fn_inputs.weights: NaN or infinite: give finite numbers",
        "token": "token 1000000, but the model's vocabulary has 512",
        "loss": "loss_fn: stable_reinforce: its definition is not public",
        "input": "data.0.loss_fn_inputs.logprobs: none: the loss ppo needs it",
        "rate": "adam_params.learning_rate: Input should be a valid number",
        "nothing": "no gradient was accumulated: call forward_backward first",
        "name": "path: a/b: give letters, digits, '.', '_' and '-'",
        "taken": "path: taken: it is saved already: give another name",
        "path": "there are no such weights, or they have expired",
        "prompt": "prompt: 1000 tokens: the model takes 255: shorten it",
        "top": "topk_sample_logprobs: 3: this is not served: leave it out",
        "sampler_base": "base_model: other: this server has tiny",
    }
    assert saw.keys() == expected.keys()
    for name, text in expected.items():
        kind, said, seconds = saw[name]
        assert kind in ("BadRequestError", "NotFoundError", "RequestFailedError"), name
        assert text in said, name
        assert seconds < QUICK_S, name


def test_models_beyond_the_places_are_refused_until_a_session_ends(tinker: Tinker) -> None:
    saw = tinker.saw("refusals places")
    kind, said, _ = saw["refused"]
    assert kind == "RequestFailedError"
    assert "all 4 places are taken by 4 models" in said
    assert saw["rank"] == 4


def test_what_is_not_served_fails_at_once_and_says_so(tinker: Tinker) -> None:
    saw = tinker.saw("refusals unserved")
    assert saw.pop("telemetry")
    methods = set(seen("tinker", "tinker_methods.py"))
    assert saw.keys() == {name for name in methods if is_unserved(name)}
    for name, error in saw.items():
        assert error, f"{name} did not fail"
        kind, said, seconds = error
        assert seconds < QUICK_S, name
        if name == "RestClient.whoami":
            assert "whoami requires JWT auth" in said
            continue
        assert kind == "NotFoundError", name
        assert "this server does not serve it" in said, name


def test_weights_of_other_owners_are_seen_once_they_are_public(tmp_path: Path) -> None:
    keys = {name: f"tml-{name * 4}-{'k' * 16}" for name in ("ann", "bob")}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({key: name for name, key in keys.items()}))
    model = tiny_model(tmp_path / "tiny")
    with served_tinker(tmp_path, model, "--keys", str(path), rollout=ROLLOUT) as variables:
        server = Tinker(variables, tmp_path)
        paths = server.saw("weights publish", TINKER_API_KEY=keys["ann"])
        of_ann = (paths["public"], paths["private"])
        saw = server.saw("weights keys", *of_ann, TINKER_API_KEY=keys["bob"])
        assert saw == {"public": 4, "private": 404}
        saw = server.saw("weights keys", *of_ann, TINKER_API_KEY=keys["ann"])
        assert saw == {"public": 4, "private": 4}
