"""A `vllm serve` whose model is a table of bigrams: it scores rows, and tells what is likeliest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.fake_vllm import FakeVllm, Refusal, send

NAME = "big-teacher"


class FakeTeacher(FakeVllm):
    """One server. Attributes are set by tests, before or while it runs.

    Example::

        with fake_teacher() as server:
            server.faults = [503, "nan"]  # of the next two rows
    """

    def __init__(self, *, vocab_size: int = 512) -> None:
        super().__init__(vocab_size=vocab_size)
        generator = torch.Generator().manual_seed(5)
        table = torch.randn(vocab_size, vocab_size, generator=generator)
        self.table = torch.log_softmax(2 * table, -1)
        """[V, V], log-probs of each token after each."""
        self.max_logprobs = 20
        self.scales: float = 1.0
        """Of all numbers: other than 1 they are no log-probs."""
        self.tokenize: Callable[[str], list[int]] | None = None
        """What /tokenize answers; None: there is no such route."""
        self.fault_of: Callable[[list[int]], Any] = lambda row: None
        """The fault of a row, where `faults` has none left."""
        self.has_adapter = False
        self.rows: list[list[int]] = []
        """Rows that were asked for, probes left out."""

    async def _plain(self, method: str, route: str, query: str, body: Any) -> Any:
        if route == "/v1/models":
            base = {"id": NAME, "max_model_len": self.max_model_len}
            adapter = {"id": "adapted", "parent": NAME}
            return {"data": [base, adapter] if self.has_adapter else [base]}
        if route == "/tokenize" and self.tokenize is not None:
            assert not body["add_special_tokens"]
            return {"tokens": self.tokenize(body["prompt"])}
        raise Refusal(404, "Not Found")

    async def _complete(
        self, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        row, top_k = body["prompt"], body["prompt_logprobs"]
        if body["model"] not in (NAME, "adapted"):
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        if top_k > self.max_logprobs:
            raise Refusal(
                400,
                f"Requested prompt logprobs of {top_k}, which is greater than max allowed: "
                f"{self.max_logprobs}",
            )
        if len(row) + 1 > self.max_model_len:
            raise Refusal(400, f"This model's maximum context length is {self.max_model_len}")
        if max(row) >= self.vocab_size:
            raise Refusal(400, f"Token id {max(row)} is out of vocabulary")
        is_probe = len(row) == 3 and row[0] == 0
        fault = None
        if not is_probe:
            self.rows.append(row)
            fault = self.faults.pop(0) if self.faults else self.fault_of(row)
        if isinstance(fault, int):
            raise Refusal(fault, "a fault of the test")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "no_json":
            await send(writer, 200, "<html>")
            return True
        if fault == "huge":
            await send(writer, 200, {"choices": [], "text": "x" * 2**23})
            return True
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.token_s)
        self.in_flight -= 1
        entries = [None, *map(self._place, row[:-1], row[1:], [top_k] * (len(row) - 1))]
        _spoil(entries, row, fault, self.vocab_size)
        choice = {"index": 0, "text": "x", "prompt_logprobs": entries, "token_ids": [3]}
        await send(writer, 200, {"choices": [choice]})
        return True

    def _place(self, before: int, token: int, top_k: int) -> dict[str, Any]:
        logprobs = self.table[before] * self.scales
        # The row's own token stands first; where it is among the likeliest, once.
        told = dict.fromkeys([token, *logprobs.topk(top_k).indices.tolist()])
        return {
            str(one): {"logprob": float(logprobs[one]), "decoded_token": "x", "rank": 1}
            for one in told
        }


def _spoil(entries: list[Any], row: list[int], fault: Any, vocab_size: int) -> None:
    """Makes an answer wrong, at its last place."""
    last, own = entries[-1], str(row[-1])
    others = [token for token in last if token != own]
    match fault:
        case "short":
            del entries[-1]
        case "nan":
            last[own]["logprob"] = float("nan")
        case "floor":
            last[own]["logprob"] = -9999.0
        case "positive":
            last[own]["logprob"] = 0.5
        case "not_own":
            entries[-1] = {token: last[token] for token in others}
        case "outside":
            last[str(vocab_size)] = last.pop(others[0])
        case "text_keys":
            last["the"] = last.pop(others[0])
        case "too_many":
            last |= {str(one): {"logprob": -20.0} for one in range(vocab_size - 9, vocab_size)}
        case "too_much":
            last |= {token: {"logprob": -0.1} for token in others}
        case "not_likeliest":
            last[others[0]]["logprob"] = -500.0


@contextmanager
def fake_teacher(**options: Any) -> Iterator[FakeTeacher]:
    """A server that runs, ended with the block."""
    server = FakeTeacher(**options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
