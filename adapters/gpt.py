"""Architectures like gpt2: layers in `transformer.h` or the like, positions that are learned, rotary or ALiBi."""

from functools import partial

from selfspec.model.adapter import Adapter

_like_gpt = partial(Adapter, layers="transformer.h", attention="attn")

ADAPTERS = (
    _like_gpt(("gpt2", "gpt-sw3", "gpt_bigcode")),
    # Attention and MLP in parallel.
    _like_gpt(("gptj", "codegen"), layer_returns=2),
    Adapter(("gpt_neox",), layers="gpt_neox.layers", attention="attention"),
    # In parallel or not, rotary positions or ALiBi.
    _like_gpt(("falcon",), attention="self_attention", layer_returns=2, ragged="padding"),
    # Every other layer looks at a local window.
    _like_gpt(("gpt_neo",), layer_returns=2, ragged="padding"),
    _like_gpt(("ctrl",), attention="multi_head_attention", mlp="ffn"),
    # ALiBi made of the padding mask, sublayers that add the residual stream themselves.
    _like_gpt(
        ("bloom",),
        attention="self_attention",
        layer_returns=2,
        without_attention="residual",
        without_mlp="residual",
        ragged="padding",
    ),
    # ALiBi made of the length of the keys, an MLP that adds the residual stream itself.
    _like_gpt(
        ("mpt",), layers="transformer.blocks", mlp="ffn", layer_returns=2, without_mlp="residual", ragged="padding"
    ),
)
