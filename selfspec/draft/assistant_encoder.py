"""What an assistant with an encoder attends to: what the model's encoder has read, if both are the same, or its own."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import takes
from selfspec.cache.source import Source, source_of
from selfspec.errors import UnsupportedOptionError
from selfspec.model.vocabulary import weight_of


def encoders_are_equal(assistant: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Return whether the encoders of two encoder-decoders have the same weights."""
    own, its = (each.get_encoder().state_dict(keep_vars=True) for each in (assistant, model))
    return own.keys() == its.keys() and all(_are_equal(weight, its[name]) for name, weight in own.items())


def share_encoder(assistant: PreTrainedModel, model: PreTrainedModel) -> None:
    """Free the weights of an assistant's encoder that equals the model's: both keep the model's."""
    its = model.get_encoder().state_dict(keep_vars=True)
    for name, weight in assistant.get_encoder().state_dict(keep_vars=True).items():
        weight.data = its[name].data


def source_by(assistant: PreTrainedModel, read: Source) -> Source:
    """Let the encoder of an assistant read what the model's has read.

    Args:
        assistant: an encoder-decoder.
        read: what the model's encoder has made of it.

    Raises:
        UnsupportedOptionError: it is not known, or this encoder cannot read it.
    """
    inputs, name, encoder = read.inputs, assistant.main_input_name, assistant.get_encoder()
    if inputs is None or (name == "input_ids" and not _are_ids(inputs, weight_of(encoder.get_input_embeddings()))):
        raise UnsupportedOptionError(
            f"the assistant {type(assistant).__name__} has an encoder of its own, which can read {name} alone, of its "
            "own vocabulary; pass these, or take an assistant with the model's encoder"
        )
    inputs = inputs.to(assistant.dtype) if inputs.is_floating_point() else inputs
    times = len(read.states) // len(inputs)
    given = {name: inputs, "attention_mask": None if read.mask is None else read.mask[::times]}
    try:
        with torch.no_grad():
            outputs = encoder(**{key: each for key, each in given.items() if takes(encoder, key)}, return_dict=True)
    except torch.OutOfMemoryError:
        raise
    # Their features differ: the width, or how long a piece is.
    except (RuntimeError, ValueError) as error:
        raise UnsupportedOptionError(
            f"the encoder of the assistant {type(assistant).__name__} cannot read what the model's reads ({error}); "
            "take a smaller model of the same family, or draft with the model itself"
        ) from error
    source = source_of(outputs, None)
    source.narrow([row // times for row in range(len(read.states))])
    source.mask = read.mask
    return source


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _are_ids(inputs: Tensor, embeddings: Tensor) -> bool:
    return not inputs.is_floating_point() and int(inputs.max()) < len(embeddings)
