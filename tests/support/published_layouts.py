"""A small decoder, and layouts of services that publish its weights and that take them."""

from __future__ import annotations

from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout


def shape_of(**changes: object) -> DecoderShape:
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 21,
        "tie_word_embeddings": True,
    }
    return DecoderShape.from_config({**sizes, **changes})


TRAIN = {
    "one": TrainLayout(),
    "tp2": TrainLayout(tp=2),
    "fsdp2": TrainLayout(dp=2, fsdp=2),
    "pp2-tp2-dp2": TrainLayout(pp=2, tp=2, dp=2, fsdp=1),
    "fsdp3": TrainLayout(dp=3, fsdp=3),
    "tp2-fsdp2": TrainLayout(tp=2, dp=2, fsdp=2),
}
GENERATE = {
    "one": HybridLayout(TrainLayout()),
    "tp2": HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2)),
    "tp2-dp2": HybridLayout(TrainLayout(tp=2, dp=2, fsdp=2), GenerateLayout(tp=2)),
    "pp2": HybridLayout(TrainLayout(pp=2), GenerateLayout(pp=2)),
}
