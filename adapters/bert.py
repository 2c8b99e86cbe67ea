"""Encoders used as decoders (`is_decoder=True`). Their sublayers add the residual stream themselves."""

from selfspec.architecture import Adapter

_NAMES = """
bert bert-generation big_bird camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert
xlm-roberta xlm-roberta-xl
"""

ADAPTER = Adapter(
    model_types=tuple(_NAMES.split()),
    layers="{base}.encoder.layer",
    attention="attention",
    mlp=("intermediate", "output"),
    without_attention="input",
    without_mlp="residual",
    requires=(("is_decoder", True),),
)
