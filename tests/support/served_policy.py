"""The policy as an endpoint, in a process of its own, and what its sessions have kept."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

KEY_VARIABLE = "TEST_POLICY_KEY"
KEY = "the key of the endpoint"

START_S = 180.0
"""Loading vLLM and the model takes 15 s on a machine that does nothing else."""

CALL_S = 120.0

RECOMPUTED = 0.1
"""How far the log-prob of a token, computed again with the whole sequence as a prompt, may be from
the one that it was sampled with: activations have the 8 bits of bfloat16, and the batches differ.
0.05 was seen; that of another token is off by more than this in nearly all places."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session that a test has opened."""

    session_id: str
    base_url: str
    key: str


class ServedPolicy:
    """An endpoint that runs.

    Example::

        session = policy.open()
        ...  # A client asks session.base_url with session.key.
        kept = policy.kept(session)
        policy.check_exact(kept)
    """

    def __init__(self, url: str, model: str, folder: Path) -> None:
        self.url = url
        self.model = model
        self.folder = folder
        self._client = httpx.Client(
            base_url=url, timeout=CALL_S, headers={"authorization": f"Bearer {KEY}"}
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def open(self, **rules: Any) -> Session:
        """A new session; `rules` are what POST /sessions takes."""
        opened = self._ask("POST", "/sessions", rules)
        return Session(opened["session_id"], opened["base_url"], opened["key"])

    def kept(self, session: Session) -> dict[str, Any]:
        """What the endpoint answers about a session."""
        kept: dict[str, Any] = self._ask("GET", f"/sessions/{session.session_id}")
        return kept

    def end(self, session: Session, **given: Any) -> dict[str, Any]:
        """Ends a session; `given` are its rewards. What is kept of it then."""
        self._ask("POST", f"/sessions/{session.session_id}/end", given)
        return self.kept(session)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of tokens, with the special ones."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def encoded(self, text: str) -> list[int]:
        """Tokens of a text, without added ones."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def answer(self, call: Mapping[str, Any]) -> str:
        """Text of what a call sampled, without its end."""
        return self.text(call["sampled_tokens"]).removesuffix("<|im_end|>")

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-prob of each token given those before it; of the first one, 0."""
        asked = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
        places = self._ask("POST", "/v1/completions", asked)["choices"][0]["prompt_logprobs"]
        return [
            0.0 if place is None else place[str(token)]["logprob"]
            for token, place in zip(tokens, places, strict=True)
        ]

    def check_exact(self, kept: Mapping[str, Any], *, forced: Collection[int] = ()) -> None:
        """Holds the branches of a session to its calls, and log-probs to what the model computes.

        Args:
            kept: The session.
            forced: Calls that were drawn within a grammar, where a token is at least as probable
                as without.
        """
        calls, trained = kept["calls"], set()
        assert kept["branches"], "the session has no branch"
        for branch in kept["branches"]:
            tokens = branch["prompt_tokens"] + branch["completion_tokens"]
            mask = [False] * len(branch["prompt_tokens"]) + branch["loss_mask"]
            computed, whole, expected = self.logprobs(tokens), [], []
            for call in (calls[number] for number in branch["calls"]):
                is_new = call["is_trained"] and call["number"] not in trained
                trained |= {call["number"]} if is_new else set()
                whole += call["added_tokens"]
                assert call["num_prompt_tokens"] == len(whole)
                expected += [False] * len(call["added_tokens"])
                for token, given in zip(call["sampled_tokens"], call["logprobs"], strict=True):
                    again = computed[len(whole)]
                    assert given >= again - RECOMPUTED, (call["number"], token, given, again)
                    is_free = call["number"] not in forced
                    assert not is_free or given <= again + RECOMPUTED, (token, given, again)
                    whole.append(token)
                    expected.append(is_new)
            assert tokens == whole
            assert mask == expected
        assert trained == {call["number"] for call in calls if call["is_trained"]}

    def close(self) -> None:
        """Drops its connections."""
        self._client.close()

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._client.request(method, path, json=body)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()


@contextlib.contextmanager
def served(
    folder: Path, *, rollout: Mapping[str, Any], endpoint: Mapping[str, Any]
) -> Iterator[ServedPolicy]:
    """An endpoint of a model folder, until the end of the block."""
    command = [
        *(sys.executable, "-m", "rolemesh.services.endpoint", str(folder)),
        *("--parent", str(os.getpid()), "--rollout", json.dumps(rollout)),
        *("--endpoint", json.dumps({"token_variable": KEY_VARIABLE, **endpoint})),
    ]
    environment = {**os.environ, KEY_VARIABLE: KEY}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said:
                process.wait(START_S)
                log.seek(0)
                raise AssertionError(f"the endpoint has not started: {log.read()[-3000:]}")
            told = json.loads(said)
            with contextlib.closing(ServedPolicy(told["url"], told["model"], folder)) as policy:
                yield policy
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
