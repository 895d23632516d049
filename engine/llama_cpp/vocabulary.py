"""A byte-level tokenizer as llama.cpp reads it: tokens, merges, and how text is cut before them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from rolemesh.engine.llama_cpp.architecture import AS_A_FOLDER, UnwritableModelError
from rolemesh.engine.model_folders.pretrained import load_tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_THE_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

SPLITS = {
    rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_THE_REST}": "llama-bpe",
    rf"{_CONTRACTIONS}|\p{{N}}|{_THE_REST}": "qwen2",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
"""What llama.cpp calls the expression by which a tokenizer cuts text into words."""

TAKES_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Where llama.cpp takes a word that is a token before it looks for merges (ignore_merges)."""

_UNUSED = "[UNUSED_{}]"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer."""

    pre: str
    """Name of the way text is cut into words, e.g. "qwen2"."""
    tokens: Sequence[str]
    """Text of each token, by id; of words in the 256 letters that stand for bytes."""
    types: Sequence[int]
    """gguf.TokenType of each."""
    merges: Sequence[str]
    """Pairs with a space between, the first ones first."""
    adds_start: bool
    """Whether text without a template begins with the start token."""
    named: Mapping[str, int]
    """Ids by GGUF key: start, end of text, end of a turn, padding."""
    chat_template: str | None

    def settings(self) -> dict[str, Any]:
        """Values by GGUF key."""
        keys = gguf.Keys.Tokenizer
        found = {
            keys.MODEL: "gpt2",
            keys.PRE: self.pre,
            keys.LIST: list(self.tokens),
            keys.TOKEN_TYPE: list(self.types),
            keys.MERGES: list(self.merges),
            keys.ADD_BOS: self.adds_start,
            keys.ADD_EOS: False,
            **self.named,
        }
        if self.chat_template is not None:
            found[keys.CHAT_TEMPLATE] = self.chat_template
        return found


def read_vocabulary(folder: Path, size: int, stop_tokens: Sequence[int]) -> Vocabulary:
    """Reads the tokenizer of a model folder.

    Args:
        folder: With tokenizer.json.
        size: Rows of the model's embedding; ids that no token has are written as unused ones.
        stop_tokens: Ids that end an answer.

    Raises:
        NoTokenizerError: There is none that can be read.
        UnwritableModelError: llama.cpp has no tokenizer of that kind.
    """
    tokenizer = load_tokenizer(folder)
    if not getattr(tokenizer, "is_fast", False):
        raise _unknown("it has no tokenizer.json")
    # What transformers makes of the file, e.g. with add_bos_token of tokenizer_config.json.
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = pre_tokenizer_of(content)
    tokens, types = _tokens(content, size)
    keys = gguf.Keys.Tokenizer
    named = {keys.BOS_ID: tokenizer.bos_token_id, keys.PAD_ID: tokenizer.pad_token_id}
    ends = (keys.EOS_ID, keys.EOT_ID, keys.EOM_ID)
    if not 1 <= len(stop_tokens) <= len(ends):
        raise _unknown(f"{len(stop_tokens)} tokens end an answer, and GGUF names 1 to {len(ends)}")
    named |= dict(zip(ends, stop_tokens, strict=False))
    template = tokenizer.chat_template
    if template is not None and not isinstance(template, str):
        raise _unknown("it has several chat templates")
    adds_start = _adds_start(tokenizer)
    if adds_start and template is not None:
        shown = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        if not shown.startswith(tokenizer.bos_token):
            raise _unknown(
                f"it begins text with {tokenizer.bos_token!r}, and its chat template does not, "
                "where llama.cpp would"
            )
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        types=types,
        merges=[
            one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]
        ],
        adds_start=adds_start,
        named={key: int(token) for key, token in named.items() if token is not None},
        chat_template=template,
    )


def pre_tokenizer_of(content: Mapping[str, Any]) -> str:
    """What llama.cpp calls the way in which a tokenizer cuts text into words.

    Told from what tokenizer.json does, not from the model's name.

    Args:
        content: Of tokenizer.json.

    Raises:
        UnwritableModelError: It is no byte-level BPE, or cuts in a way that is not known here.
    """
    model = content["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte_fallback" if model.get("byte_fallback") else model.get("type")
        raise _unknown(f"it is {kind}, and known is byte-level BPE")
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise _unknown(f"its model has {field} {model[field]!r}, and known is none")
    if (content.get("decoder") or {}).get("type") != "ByteLevel":
        raise _unknown("its decoder is not ByteLevel")
    pre = _split_name(content.get("pre_tokenizer") or {})
    normalizer = (content.get("normalizer") or {}).get("type")
    # llama.cpp normalizes nothing, also for these: text in NFC is the same.
    if normalizer is not None and not (pre == "qwen2" and normalizer == "NFC"):
        raise _unknown(f"its normalizer is {normalizer}, and llama.cpp has none")
    if bool(model.get("ignore_merges")) != (pre in TAKES_WHOLE_WORDS):
        raise _unknown(
            f"its ignore_merges is {bool(model.get('ignore_merges'))}, and llama.cpp has "
            f"{pre in TAKES_WHOLE_WORDS} for {pre}"
        )
    return pre


def _split_name(pre_tokenizer: Mapping[str, Any]) -> str:
    steps = (
        pre_tokenizer["pretokenizers"]
        if pre_tokenizer.get("type") == "Sequence"
        else [pre_tokenizer]
    )
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _unknown(f"its pre_tokenizer ends with {json.dumps(last)}, and known is ByteLevel")
    match before, last.get("use_regex", True):
        case [], True:
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}], True:
            return "smollm"
        case [
            {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": False,
            }
        ], False if expression in SPLITS:
            return SPLITS[expression]
        case _:
            raise _unknown(f"its pre_tokenizer is {json.dumps(pre_tokenizer)}, which is not known")


def _tokens(content: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Text and type of each id below the size."""
    by_id = {int(index): (text, gguf.TokenType.NORMAL) for text, index in
             content["model"]["vocab"].items()}  # fmt: skip
    for added in content["added_tokens"]:
        text = str(added["content"])
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise _unknown(f"its token {text!r} has lstrip, rstrip or single_word")
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        by_id[int(added["id"])] = (text, kind)
    if max(by_id) >= size:
        raise _unknown(f"it has the token {max(by_id)}, and the model {size} of them")
    both = [by_id.get(at, (_UNUSED.format(at), gguf.TokenType.UNUSED)) for at in range(size)]
    return [text for text, _ in both], [int(kind) for _, kind in both]


def _adds_start(tokenizer: Any) -> bool:
    """Whether text begins with the start token; nothing else may be added."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    if whole == plain:
        return False
    if tokenizer.bos_token_id is not None and whole == [tokenizer.bos_token_id, *plain]:
        return True
    raise _unknown(f"it makes {whole} of a text whose tokens are {plain}")


def _unknown(why: str) -> UnwritableModelError:
    return UnwritableModelError(
        f"--gguf: llama.cpp would not read text as the model's tokenizer does ({why}): "
        f"{AS_A_FOLDER}"
    )
