"""Decoders whose MLP is two linears of the layer: those of encoder-decoder models, used alone, and opt's kind."""

from functools import partial

from selfspec.model.adapter import Adapter

_NAMES = "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart whisper"
_like_bart = partial(Adapter, layers="model.decoder.layers", mlp=("fc1", "fc2"))

ADAPTERS = (
    # These count positions from the length of the cache.
    _like_bart(tuple(_NAMES.split()), ragged="none"),
    _like_bart(("mvp", "trocr"), layer_returns=2, ragged="none"),
    _like_bart(("opt",)),
    _like_bart(("xglm", "biogpt"), layers="{base}.layers"),
)
