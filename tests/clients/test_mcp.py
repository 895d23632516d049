"""Tests of an MCP server's tools, offered to the policy by an agent with the openai SDK."""

from __future__ import annotations

import pytest
from support.client_programs import seen
from support.served_policy import ServedPolicy

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("over", ["stdio", "http", "session"])
def test_results_of_tools_come_behind_the_calls_that_were_sampled(
    policy: ServedPolicy, over: str
) -> None:
    session = policy.open()
    saw = seen("mcp", "mcp_agent.py", over, session=session)
    assert saw["tools"] == ["price", "total"]
    name, arguments = saw["calls"][0]
    assert name == "price"
    assert saw["results"][0] == f"{arguments['fruit']} costs {7 * len(arguments['fruit'])} cents"
    kept = policy.kept(session)
    assert [call["parent"] for call in kept["calls"]] == [None, 0, 1]
    for call, result in zip(kept["calls"][1:], saw["results"], strict=True):
        shown = policy.text(call["added_tokens"])
        assert shown.endswith(f"<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n")
    assert policy.answer(kept["calls"][2]) == saw["text"]
    # The tools stand in the prompt once, and the client sees the tokens that the session keeps.
    (branch,) = kept["branches"]
    whole = branch["prompt_tokens"] + branch["completion_tokens"]
    assert whole[: len(saw["prompt"])] == saw["prompt"]
    assert policy.text(branch["prompt_tokens"]).count('"name": "price"') == 1
    policy.check_exact(kept, forced={0, 1})
