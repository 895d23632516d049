"""Rewards of the open inference protocol in its JSON form, from a real web server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.outside_rows import reward_rows

from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import KServeRewardSpec
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideRewardError,
    RewardAnswerInvalidError,
    RewardRefusedError,
)
from rolemesh.services.reward.outside.make import make_outside_reward


class InferenceHandler(BaseHTTPRequestHandler):
    """Models "judge" (the length of a completion), "nested" (a column), and some that lie."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, _, _, model, *version, verb = self.path.split("/")
        assert verb == "infer"
        inputs = {tensor["name"]: tensor for tensor in request["inputs"]}
        texts = inputs["completion"]["data"]
        count = len(texts)
        assert {tensor["datatype"] for tensor in inputs.values()} == {"BYTES"}
        assert request["outputs"] == [{"name": "reward"}]
        if model == "absent":
            self.answer(404, {"error": "no such model"})
            return
        rewards: list[Any] = [float(len(text)) for text in texts]
        shape = inputs["completion"]["shape"]
        assert shape in ([count], [count, 1])
        if model == "nested":
            rewards, shape = [[reward] for reward in rewards], [count, 1]
        if version:
            rewards = [float(version[1])] * count
        if model == "lies":
            shape = [count, 3]
        name = "score" if model == "unnamed" else "reward"
        output = {"name": name, "datatype": "FP32", "shape": shape, "data": rewards}
        self.answer(200, {"model_name": model, "outputs": [output]} if model != "odd" else [1])

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


NO_SANDBOX = find_sandbox("off")
"""For rewards that run no function."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), InferenceHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def judged(url: str, model: str, **spec: Any) -> Judgement:
    reward = make_outside_reward(
        "it", KServeRewardSpec(urls=(url,), model=model, **spec), NO_SANDBOX
    )
    try:
        return await reward.judge(reward_rows("a", "b\u00e4", "", answer="4"))
    finally:
        await reward.close()


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("judge", {}),
        ("nested", {}),
        ("judge", {"sends_column": True, "answer_input": "answer", "prompt_input": None}),
    ],
)
async def test_a_json_server_is_asked(url: str, model: str, spec: dict[str, Any]) -> None:
    judgement = await judged(url, model, **spec)
    assert not judgement.failures
    assert judgement.rewards == [1.0, 2.0, 0.0]


async def test_a_version_of_a_model_is_asked(url: str) -> None:
    assert (await judged(url, "judge", version="3")).rewards == [3.0] * 3


@pytest.mark.parametrize(
    ("model", "error", "found"),
    [
        ("absent", RewardRefusedError, "status 404.*no such model"),
        ("lies", RewardAnswerInvalidError, r"shape list \[3, 3\] for 3 rows"),
        ("unnamed", RewardAnswerInvalidError, r"outputs \['score'\]"),
        ("odd", RewardAnswerInvalidError, r"list \[1\]"),
    ],
)
async def test_other_answers_are_refused(
    url: str, model: str, error: type[OutsideRewardError], found: str
) -> None:
    judgement = await judged(url, model)
    assert judgement.rewards == [None] * 3
    with pytest.raises(error, match=found):
        raise judgement.failures[0]
