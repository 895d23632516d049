"""Tiny random models with a small trained BPE, of each family and each way to cut text into words.

And what is written of them as GGUF.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny_families import write_tiny_decoder
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from rolemesh.engine.llama_cpp.vocabulary import SPLITS, TAKES_WHOLE_WORDS
from rolemesh.engine.specs import GgufType, ModelSpec, OptimizerSpec
from rolemesh.engine.train.export import export_policy
from rolemesh.engine.train.trainer import Trainer
from rolemesh.quickstart.tiny_model import CHAT_TEMPLATE, END, PAD, START

PRES = ("gpt-2", "smollm", *SPLITS.values())

TOOL = "<tool>"
"""A token that is added, and no special one."""

NUM_TOKENS = 400
VOCAB_SIZE = 512
"""Of the models: the last rows of the embedding belong to no token."""

TEXTS = (
    "The answer isn't 12345, we'll see: it's 67 + 8 = 75!\n\n  A line begins with spaces.",
    "Größe, naïve, 日本語 and Привет; CamelCaseWords and SHOUTED ones, 3.14159...\r\n\tTab",
    "don't DON'T we'RE I'll   many   spaces   \n\n\n end ",
    "emoji 🙂🙃 and ½ ² ①, a/b/c//d <tool> http://example.org/?q=1&r=2",
)
"""What tells the ways to cut apart."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # So short that all three ranges of frequencies are among the 16.
    "original_max_position_embeddings": 64,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True, "pre": "smollm"},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-3": {"family": "llama", "rope_parameters": LLAMA3_ROPE, "pre": "llama-bpe"},
    "mistral": {"sliding_window": 192, "pre": "tekken"},
    # llama.cpp knows no other size of its heads than this.
    "qwen2": {"pre": "qwen2", "head_dim": 16},
    "qwen3": {"pre": "qwen2", "tie_word_embeddings": True},
}
"""Models by name; what is left out is as usual."""


def pre_tokenizer_of(pre: str) -> Any:
    """The steps before the merges that llama.cpp calls so."""
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    (expression,) = (one for one, name in SPLITS.items() if name == pre)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def bpe_tokenizer(pre: str, *, adds_start: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE that is trained on the texts."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in TAKES_WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizer_of(pre)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - 1,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(TOOL, special=False, normalized=False)])
    if adds_start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_model(directory: Path, name: str, **changes: Any) -> Path:
    """Writes the folder of one of CASES, with its tokenizer."""
    case = {"family": name, "pre": "gpt-2", **CASES[name], **changes}
    family, pre = case.pop("family"), case.pop("pre")
    write_tiny_decoder(directory, family, **{**SIZES, **case})
    bpe_tokenizer(pre).save_pretrained(directory)
    return directory


def save_checkpoint(model: Path, directory: Path, **section: Any) -> Path:
    """A checkpoint of the untrained model; the section may give it an adapter."""
    spec = {"path": model, "compute_dtype": "float32", **section}
    Trainer.policy(ModelSpec.model_validate(spec), OptimizerSpec()).save(directory)
    return directory


def exported(model: Path, folder: Path, kind: GgufType) -> Path:
    """The file of a model, by way of a checkpoint."""
    file = folder / f"{kind}.gguf"
    if file.exists():
        return file
    if not (folder / "checkpoint").exists():
        save_checkpoint(model, folder / "checkpoint")
    export_policy(folder / "checkpoint", model, file, gguf=kind)
    return file
