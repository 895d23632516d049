"""The same calls to whichever server of Tinker's protocol TINKER_BASE_URL names, and timed.

Runs in an environment with Tinker's SDK, unmodified: tinker_calls.py MODEL SETTINGS, the folder of
the model's tokenizer and a JSON object. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tinker
from processor_time import tree_seconds
from tinker import types
from tokenizers import Tokenizer

# Lets optim_step drop the gradients and leave the weights, so that each repeat has the same work.
NO_STEP = types.AdamParams(learning_rate=0.0)

TEXT = (
    "the river carried small boats past old houses while people on both banks watched quietly and "
    "children ran along stone walls to see where water turned east under a bridge that nobody had "
    "crossed since winter because its wooden planks were loose but still held every careful step"
)


def main() -> None:
    """Makes the calls, the first ones of each kind as a warm-up."""
    tokenizer = Tokenizer.from_file(f"{sys.argv[1]}/tokenizer.json")
    wish = json.loads(sys.argv[2])
    texts = drawn_texts(tokenizer, wish["data"], wish["data_tokens"], seed=1)
    data = [datum(tokens) for tokens in texts]
    prompts = [
        types.ModelInput.from_ints(tokens[:-1])
        for tokens in drawn_texts(tokenizer, wish["prompts"], wish["prompt_tokens"], seed=2)
    ]
    # The server is ended after this program: clients of older SDKs cannot be closed.
    service = tinker.ServiceClient()
    (model,) = service.get_server_capabilities().supported_models
    client = service.create_lora_training_client(
        base_model=str(model.model_name), rank=wish["rank"], seed=1
    )
    pid = wish["server"]
    passes = []
    for _ in range(wish["warmups"] + wish["passes"]):
        spent, output = timed(pid, lambda: client.forward_backward(data, "cross_entropy").result())
        client.optim_step(NO_STEP).result()
        logprobs = [list(one["logprobs"].data) for one in output.loss_fn_outputs]
        tokens = sum(map(len, logprobs))
        passes.append({**spent, "tokens": tokens, "logprobs": logprobs})
        told("forward_backward", spent)
    sampler = client.save_weights_and_get_sampling_client()
    samples = []
    params = types.SamplingParams(max_tokens=wish["new_tokens"], temperature=1.0)
    for _ in range(wish["warmups"] + wish["generations"]):
        spent, made = timed(pid, lambda: sampled(sampler, prompts, wish["samples"], params))
        spent["logprob"] = statistics.fmean(value for one in made for value in one.logprobs)
        samples.append({**spent, "tokens": sum(len(one.tokens) for one in made)})
        told("sample", spent)
    print(
        json.dumps(
            {
                "passes": passes[wish["warmups"] :],
                "samples": samples[wish["warmups"] :],
                "first_seconds": [passes[0]["seconds"], samples[0]["seconds"]],
                "sdk": tinker.__version__,
            }
        ),
        flush=True,
    )


def told(what: str, spent: dict[str, float]) -> None:
    """Shows that it goes on."""
    print(
        what, {name: round(value, 2) for name, value in spent.items()}, file=sys.stderr, flush=True
    )


def timed(pid: int, call: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
    """Seconds by the clock and of processors that a call takes of the server, and its result."""
    begun, used = time.perf_counter(), tree_seconds(pid)
    result = call()
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "core_seconds": tree_seconds(pid) - used}, result


def sampled(
    sampler: Any,
    prompts: Sequence[types.ModelInput],
    num_samples: int,
    params: types.SamplingParams,
) -> list[Any]:
    """Samples of all prompts, which are asked for at once."""
    futures = [sampler.sample(prompt, num_samples, params) for prompt in prompts]
    return [one for future in futures for one in future.result().sequences]


def datum(tokens: list[int]) -> types.Datum:
    """A text whose tokens behind the first are the targets, each of weight 1."""
    targets = tokens[1:]
    shape = [len(targets)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=shape),
            "weights": types.TensorData(data=[1.0] * len(targets), dtype="float32", shape=shape),
        },
    )


def drawn_texts(
    tokenizer: Any, count: int, lengths: tuple[int, int], *, seed: int
) -> list[list[int]]:
    """Words at random, of lengths that are spread evenly, and one token more for the targets."""
    drawn, vocabulary = random.Random(seed), TEXT.split()
    least, most = lengths
    made = []
    for number in range(count):
        length = least + round((most - least) * number / max(1, count - 1))
        # No word has less than a token.
        words = " ".join(drawn.choice(vocabulary) for _ in range(most + 1))
        made.append(tokenizer.encode(words, add_special_tokens=False).ids[: length + 1])
    drawn.shuffle(made)
    return made


if __name__ == "__main__":
    main()
