"""Writes a tiny random Llama as a Hugging Face folder, for tries of seconds.

It learns what a few tokens can show, e.g. to write a certain letter, and nothing of language::

    python -m rolemesh.quickstart.tiny_model --out .models/tiny

The same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rolemesh.engine.weights.checkpoints.folders import FolderExistsError, whole_folder

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
SPECIAL_TOKENS = (PAD, START, END, UNKNOWN)
PAD_ID, START_ID, END_ID = 0, 1, 2
VOCAB_SIZE = 512
HEAD_DIM = 32
"""The smallest head that vLLM's CPU attention takes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Wide enough that the next-token distribution is far from uniform (so that greedy choices are
# not ties and a forgotten layer shows), small enough that no softmax saturates.
INITIALIZER_RANGE = 0.15


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE: 4 special tokens, 256 bytes, and merges of two lower-case letters.

    Every id below vocab_size decodes to something, so that random models can be sampled from.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    num_merges = vocab_size - len(SPECIAL_TOKENS) - len(alphabet)
    if not 0 <= num_merges <= len(pairs):
        raise ValueError(
            f"vocab_size is {vocab_size}: give {len(SPECIAL_TOKENS) + len(alphabet)} to "
            f"{len(SPECIAL_TOKENS) + len(alphabet) + len(pairs)}"
        )
    merges = pairs[:num_merges]
    entries = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={text: index for index, text in enumerate(entries)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(
    *,
    tied: bool,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 512,
) -> LlamaConfig:
    """Config of a tiny model, with heads as small as samplers take.

    Args:
        tied: input and output embedding are one tensor.
        vocab_size: of tokenizer and model alike.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads, of 32 each.
        num_kv_heads: key and value heads.
        max_position_embeddings: longest sequence.
    """
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=PAD_ID,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        dtype="float32",
    )


@torch.no_grad()
def perturb_vectors(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Moves norm weights off 1, where a forgotten one would not be noticed."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def write_tiny_llama(
    directory: Path | str,
    *,
    seed: int = 0,
    tied: bool = True,
    initializer_range: float = INITIALIZER_RANGE,
    **sizes: int,
) -> Path:
    """Writes a causal LM folder: config, float32 safetensors, tokenizer, generation config.

    Args:
        directory: made if absent.
        seed: of the random weights.
        tied: see `tiny_config`.
        initializer_range: standard deviation of the random weights.
        **sizes: see `tiny_config`.

    Returns:
        The folder.
    """
    directory = Path(directory)
    config = tiny_config(tied=tied, **sizes)
    config.initializer_range = initializer_range
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    perturb_vectors(model, torch.Generator().manual_seed(seed + 1))
    model.generation_config = GenerationConfig(
        pad_token_id=PAD_ID, bos_token_id=START_ID, eos_token_id=END_ID
    )
    model.save_pretrained(directory)
    tiny_tokenizer(config.vocab_size).save_pretrained(directory)
    return directory


def main(arguments: list[str] | None = None) -> int:
    """Command line: `--out DIR [--longest TOKENS]`."""
    parser = argparse.ArgumentParser(
        prog="python -m rolemesh.quickstart.tiny_model", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--longest", type=int, default=4096, help="tokens that it can see")
    options = parser.parse_args(arguments)
    try:
        with whole_folder(options.out) as temporary:
            write_tiny_llama(temporary, max_position_embeddings=options.longest)
    except (OSError, FolderExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
