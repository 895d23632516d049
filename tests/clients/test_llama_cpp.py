"""Policies as GGUF files in llama.cpp's own server, against transformers, and evaluated there."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from support.client_programs import PROGRAMS, START_S, free_ports, serving
from support.cookbook import MODEL
from support.evaluations import evaluated, rows_beside
from support.gguf_models import CASES, PRES, TEXTS, bpe_tokenizer, exported, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolemesh.engine.rewards.arithmetic import arithmetic_score
from rolemesh.engine.specs import ArithmeticRewardSpec, GgufType

pytestmark = pytest.mark.clients

NUM_NEW = 24
QUESTIONS = (
    "What is 17 + 25?",
    "Name three colours.",
    "What is 9 + 8? Answer with the number alone.",
    "Write one sentence about the sea.",
)

EXACT = 2e-5
"""Between log-probs of tiny models when all is float32, in sums of another order; 6e-6 was seen."""

WITH_F16_CACHE = 0.014
"""The same with llama.cpp's usual attention, in float16, on SmolLM2; 0.007 was seen."""

GAPS: dict[GgufType, float] = {"f16": 0.02, "bf16": 0.06, "q8_0": 0.4}
"""Greatest difference of a log-prob on SmolLM2, with the float16 cache; 0.011, 0.031 and 0.227 were
seen, and twice that is a mistake."""


@dataclass(frozen=True)
class Greedy:
    """What a model answers to a prompt, taking the likeliest token each time."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float | None]
    """None where it is not known."""


class Server:
    """llama.cpp's server with one model."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **body: Any) -> Any:
        answer = httpx.post(self.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def greedy(self, prompt: list[int]) -> Greedy:
        said = self.ask(
            "/completion",
            **{"prompt": prompt, "n_predict": NUM_NEW, "temperature": 0},
            **{"n_probs": 1, "return_tokens": True},
        )
        # Of a token that ends within a character it tells no log-prob.
        told = iter(said["completion_probabilities"])
        logprobs: list[float | None] = []
        one = next(told, None)
        for token in said["tokens"]:
            is_told = one is not None and one["id"] == token
            logprobs.append(one["logprob"] if one is not None and is_told else None)
            one = next(told, None) if is_told else one
        assert one is None
        return Greedy(prompt, said["tokens"], logprobs)

    def logprob(self, prompt: list[int], token: int) -> float:
        """Of a token that need not be the likeliest."""
        choice = self.ask(
            "/v1/completions", prompt=prompt, max_tokens=1, temperature=0, logprobs=50
        )["choices"][0]
        first = choice["logprobs"]["content"][0]
        (found,) = (one["logprob"] for one in first["top_logprobs"] if one["id"] == token)
        return float(found)


@contextlib.contextmanager
def llama_cpp(file: Path, folder: Path, how: str = "usual") -> Iterator[Server]:
    (port,) = free_ports(1)
    command = ("python", str(PROGRAMS / "llama_server.py"), str(file), str(port), how)
    with serving("llama_cpp", *command, ports=[port], folder=folder):
        server = Server(port)
        deadline = time.monotonic() + START_S
        while httpx.get(f"{server.url}/health").status_code != 200:
            assert time.monotonic() < deadline, "the model is not loaded"
            time.sleep(0.1)
        yield server


def by_transformers(lm: Any, prompt: list[int]) -> Greedy:
    with torch.no_grad():
        made = lm.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = made.sequences[0, len(prompt) :].tolist()
    rows = zip(made.logits, tokens, strict=True)
    return Greedy(prompt, tokens, [float(row[0].log_softmax(-1)[token]) for row, token in rows])


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """A user's turn by the template, up to where the answer begins."""
    turns = [{"role": "user", "content": text}]
    told = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return list(told.input_ids)


def check_same(found: Greedy, expected: Greedy, within: float) -> None:
    assert found.tokens == expected.tokens
    pairs = zip(found.logprobs, expected.logprobs, strict=True)
    gaps = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    assert gaps
    print(f"greatest difference of a log-prob: {max(gaps):.1e}")
    assert max(gaps) < within


@pytest.mark.parametrize("name", CASES)
def test_each_family_computes_in_llama_cpp_what_it_does_in_transformers(
    name: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", name)
    lm, tokenizer = loaded(model), AutoTokenizer.from_pretrained(model)
    with llama_cpp(exported(model, tmp_path, "f32"), tmp_path, how="exact") as server:
        for at in range(len(TEXTS)):
            prompt = tokenizer("".join(TEXTS[at:] + TEXTS[:at])).input_ids
            # Long enough that a wrong rotation shows also where it turns slowly.
            assert len(prompt) > 64
            check_same(server.greedy(prompt), by_transformers(lm, prompt), EXACT)


@pytest.mark.parametrize("adds_start", [False, True])
@pytest.mark.parametrize("pre", PRES)
def test_llama_cpp_reads_text_as_the_tokenizer_does(
    pre: str, adds_start: bool, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", "llama")
    tokenizer = bpe_tokenizer(pre, adds_start=adds_start)
    tokenizer.save_pretrained(model)
    with llama_cpp(exported(model, tmp_path, "q8_0"), tmp_path) as server:
        for text in (*TEXTS, "<|im_start|>user\nHi<|im_end|>"):
            tokens = server.ask("/tokenize", content=text, add_special=True)["tokens"]
            assert tokens == tokenizer(text).input_ids, text
        # A start token that the template writes and the server adds is there once.
        turns = [{"role": "user", "content": TEXTS[0]}]
        rendered = server.ask("/apply-template", messages=turns)["prompt"]
        tokens = server.ask("/tokenize", content=rendered, add_special=True)["tokens"]
        assert tokens == chat_tokens(tokenizer, TEXTS[0])


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Sequence[Greedy]]:
    """Tokenizer of the quickstart's model, and what the model answers."""
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is not there: run `make model`")
    lm, tokenizer = loaded(MODEL), AutoTokenizer.from_pretrained(MODEL)
    prompts = [chat_tokens(tokenizer, text) for text in QUESTIONS]
    return tokenizer, [by_transformers(lm, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For its checkpoint and files, which tests share."""
    return tmp_path_factory.mktemp("smollm2")


def test_smollm2_in_float32_answers_as_in_transformers(
    smollm2: tuple[Any, Sequence[Greedy]], files: Path, tmp_path: Path
) -> None:
    with llama_cpp(exported(MODEL, files, "f32"), tmp_path) as server:
        for expected in smollm2[1]:
            check_same(server.greedy(expected.prompt), expected, WITH_F16_CACHE)


@pytest.mark.parametrize("kind", GAPS)
def test_narrow_types_stay_within_their_gap(
    kind: GgufType, smollm2: tuple[Any, Sequence[Greedy]], files: Path, tmp_path: Path
) -> None:
    differences = []
    same = total = 0
    with llama_cpp(exported(MODEL, files, kind), tmp_path) as server:
        for expected in smollm2[1]:
            found = server.greedy(expected.prompt)
            # Up to the first other token, behind which they answer to other prompts.
            pairs = list(zip(found.tokens, expected.tokens, strict=False))
            same += next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
            total += len(expected.tokens)
            for at, (token, logprob) in enumerate(
                zip(expected.tokens, expected.logprobs, strict=True)
            ):
                there = server.logprob(expected.prompt + expected.tokens[:at], token)
                assert logprob is not None
                differences.append(abs(there - logprob))
    mean = sum(differences) / len(differences)
    print(f"{kind}: greatest {max(differences):.4f}, mean {mean:.4f}, {same} of {total} tokens")
    assert max(differences) < GAPS[kind]


def test_an_evaluation_scores_the_same_rows_at_llama_cpp(
    smollm2: tuple[Any, Sequence[Greedy]], files: Path, tmp_path: Path
) -> None:
    tokenizer, answers = smollm2
    for name, asked in {"train": ("What is 1 + 1?",), "held": QUESTIONS}.items():
        rows = [{"prompt": [{"role": "user", "content": text}], "answer": "42"} for text in asked]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    suite = {
        "asked": {
            "data": {
                "type": "jsonl",
                "path": str(tmp_path / "train.jsonl"),
                "held_out_path": str(tmp_path / "held.jsonl"),
            },
            "reward": {"type": "arithmetic"},
        }
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in answers]
    with llama_cpp(exported(MODEL, files, "f32"), tmp_path) as server:
        for name, more in {"messages": (), "tokens": ("--tokenizer", str(MODEL))}.items():
            out = tmp_path / f"{name}.json"
            code, told = evaluated(
                tmp_path,
                *("--url", f"{server.url}/v1", "--tasks", "suite.yaml", "--out", str(out)),
                *("--max-tokens", str(NUM_NEW)),
                *more,
            )
            assert code == 0, told
            found = rows_beside(out)
            assert [one["completion"] for one in found] == texts
            expected = [arithmetic_score(ArithmeticRewardSpec(), text, "42") for text in texts]
            assert [one["score"] for one in found] == expected
