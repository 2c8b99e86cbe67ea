"""Read the inputs that `generate` of `transformers` passes on for an encoder-decoder: the source and the decoder's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from selfspec.architecture import Adapter, takes_positions
from selfspec.cache.source import Source, source_of
from selfspec.cache.transfer import is_callers
from selfspec.decode.options import unsupported
from selfspec.errors import UnsupportedOptionError
from selfspec.model.vocabulary import weight_of

# The names that decoder-only models have for these inputs.
_OF_DECODER = {"decoder_attention_mask": "attention_mask", "decoder_position_ids": "position_ids"}


def first_of(options: Mapping[str, Any], names: Sequence[str]) -> Tensor | None:
    """Return the first of the named options, or the first tensor of an encoder output; None: there is none."""
    given = next((options[name] for name in names if options.get(name) is not None), None)
    return given if given is None or isinstance(given, Tensor) else given[0]


def decoder_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the decoder, under the names that decoder-only models use."""
    return {
        _OF_DECODER.get(name, name): value
        for name, value in inputs.items()
        # `generate` makes an empty cache; embeddings with this name are the encoder's.
        if name not in ("encoder_outputs", "attention_mask", "inputs_embeds") and not isinstance(value, Cache)
    }


def read_source(
    model: PreTrainedModel, adapter: Adapter, inputs: Mapping[str, Any], read: Tensor | None = None
) -> Source:
    """Read the encoder's output for a call.

    Args:
        model: an encoder-decoder.
        adapter: where its layers are.
        inputs: of its first pass, as `generate` has prepared them.
        read: the input of the encoder, before rows were repeated; None: it is not known.

    Raises:
        UnsupportedOptionError: the caller passes a cache, or an option that is not supported with an encoder, or pads
            texts of the decoder where the model counts padding.
    """
    if any(isinstance(value, Cache) and is_callers(value) for value in inputs.values()):
        raise UnsupportedOptionError(
            "a cache beside an encoder is not supported; pass what it holds as decoder_input_ids, without a cache"
        )
    mask = inputs.get("decoder_attention_mask")
    counted = adapter.positions is not None and not takes_positions(model)
    if counted and isinstance(mask, Tensor) and not bool((mask != 0).all()):
        raise UnsupportedOptionError(
            f"decoder_attention_mask: {type(model).__name__} counts padding as text; pass texts of one length, or one "
            "row at a time"
        )
    for name in ("decoder_inputs_embeds", "labels"):
        if inputs.get(name) is not None:
            raise unsupported(name)
    source = source_of(inputs["encoder_outputs"], inputs.get("attention_mask"))
    # If the caller passes encoder outputs, `transformers` puts negative ids in place of the encoder's input.
    if read is not None and (read.is_floating_point() or not bool((read < 0).any())):
        source.inputs = read
        if read.ndim == 2 and not read.is_floating_point() and _shares_vocabulary(model):
            source.text = _text(read, source)
    return source


def _shares_vocabulary(model: PreTrainedModel) -> bool:
    """Return whether encoder and decoder use the same token ids: they share their embeddings."""
    shared = weight_of(model.get_encoder().get_input_embeddings())
    own = weight_of(model.get_decoder().get_input_embeddings())
    return shared is own or bool(shared.data_ptr() == own.data_ptr())


def _text(read: Tensor, source: Source) -> list[list[int]]:
    """Return the ids of each row of a source, without padding."""
    rows = len(source.states)
    mask = torch.ones_like(read) if source.mask is None else source.mask[:: rows // len(read)]
    texts = [ids[kept.bool().to(ids.device)].tolist() for ids, kept in zip(read, mask, strict=True)]
    return [text for text in texts for _ in range(rows // len(read))]


@torch.no_grad()
def cross_attentions(
    model: PreTrainedModel, source: Source, mask: Tensor, text: Tensor
) -> tuple[tuple[Tensor, ...], ...]:
    """Return the cross-attention weights of a text over its source, by one pass of the stock model over the text.

    Args:
        model: an encoder-decoder whose attention returns its weights.
        source: read by the encoder.
        mask: which columns of the prompts hold a token, `[rows, prompt]`.
        text: prompts and generated tokens, `[rows, length]`.

    Returns:
        For each pass of plain decoding and each layer `[rows, heads, tokens, places]`; the last token is not read.
    """
    prompt, new = mask.shape[1], text.shape[1] - 1 - mask.shape[1]
    whole = torch.cat([mask, mask.new_ones(len(mask), new)], 1).long()
    positions = {"decoder_position_ids": (whole.cumsum(1) - 1).clamp(min=0)} if takes_positions(model) else {}
    layers = model(
        encoder_outputs=source.outputs,
        attention_mask=source.mask,
        decoder_input_ids=text[:, :-1],
        decoder_attention_mask=whole,
        **positions,
        output_attentions=True,
        use_cache=False,
    ).cross_attentions
    return tuple(zip(*(layer.split([prompt, *[1] * new], 2) for layer in layers), strict=True))
