"""Encoders used as decoders (`is_decoder=True`): their sublayers add the residual stream themselves."""

from functools import partial

from selfspec.model.adapter import Adapter

_NAMES = """
bert bert-generation big_bird camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert
xlm-roberta xlm-roberta-xl
"""
_like_bert = partial(
    Adapter,
    layers="{base}.encoder.layer",
    attention="attention",
    mlp=("intermediate", "output"),
    without_attention="input",
    without_mlp="residual",
)
_DECODER = (("is_decoder", True),)

ADAPTERS = (
    _like_bert(tuple(_NAMES.split()), requires=_DECODER),
    _like_bert(("megatron-bert", "rembert"), layer_returns=2, requires=_DECODER),
    # It counts positions from the length of the cache.
    _like_bert(("roformer",), layer_returns=2, requires=_DECODER, ragged="none"),
    # Text alone: a bert after an image encoder.
    _like_bert(("git",), layers="git.encoder.layer", attention_returns=1),
)
