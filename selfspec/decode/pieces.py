"""Run models whose own `generate` calls the common one: once, or for each piece of its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from inspect import currentframe
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from selfspec.architecture import Adapter
from selfspec.decode.generation import Generation
from selfspec.decode.options import check_not_dropped, unsupported
from selfspec.decode.output import GenerateOutput
from selfspec.decode.request import Request, prepared_request
from selfspec.decode.stats import Stats
from selfspec.model.registry import has_encoder
from selfspec.model.view import view_with

# Seeds of pieces differ by multiples of _APART, so that neighbouring seeds do not give two pieces the same noise.
_APART, _SEEDS = 0x9E3779B97F4A7C15, 1 << 64


@dataclass
class Transcript(GenerateOutput):
    """The output of a model's own `generate` for all pieces of its input.

    Attributes:
        sequences: token ids, `[batch, length]`, as that `generate` returns them: for speech the text alone.
        lengths: tokens of each row without the padding at its end.
        segments: of each row, if that `generate` returns them: see its documentation.
        token_timestamps: seconds of each token, `[batch, length]`, if `return_token_timestamps` asks for them.
        stats: counts and times of all calls together, including calls that a fallback repeats.
    """

    segments: list[list[dict[str, Any]]] | None = None
    token_timestamps: Tensor | None = None


def has_own_generate(model: PreTrainedModel) -> bool:
    """Return whether a model with an encoder has a `generate` of its own."""
    return has_encoder(model) and type(model).generate is not GenerationMixin.generate


def generate_in_pieces(
    model: PreTrainedModel,
    adapter: Adapter,
    begin: Callable[[Request, int | None], Generation],
    seed: int | None,
    inputs: Tensor | None,
    options: Mapping[str, Any],
) -> GenerateOutput:
    """Run a model's own `generate`, with selfspec's decoding in each of its calls of the common one.

    Args:
        model: with a `generate` of its own.
        adapter: where its layers are.
        begin: begins a call, with its seed.
        seed: of the first call; later seeds follow from it. None: each call draws one.
        inputs: input of the encoder; None: it is among the options.
        options: of the model's `generate`.

    Raises:
        UnsupportedOptionError: names an option that cannot be honoured.
        ValueError, TypeError: as the model's `generate` raises them.
    """
    if options.get("output_attentions"):
        raise unsupported("output_attentions")
    parts: list[Generation] = []

    def decode(
        asking: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        check_not_dropped(currentframe())
        request = prepared_request(
            asking,
            adapter,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            inputs_tensor=inputs_tensor,
            **model_kwargs,
        )
        parts.append(begin(request, None if seed is None else _seed(seed, len(parts))))
        return parts[-1].answer()

    given = () if inputs is None else (inputs,)
    # For timestamps of tokens Whisper sets another kernel and keeps it, while other threads may run the model.
    asked = _set_apart(model) if options.get("return_token_timestamps") else model
    result = type(model).generate(asked, *given, **options, custom_generate=decode)
    return _together(model, result, parts)


def _set_apart(model: PreTrainedModel) -> PreTrainedModel:
    """Make a view of a model with its own config and hooks: `transformers` adds hooks where it returns attentions.

    Raises:
        UnsupportedModelError: the `forward` of a part was replaced by a function that would run the model's own parts.
    """
    config = copy(model.config)

    def apart(module: nn.Module) -> nn.Module:
        view = view_with(module, {name: apart(child) for name, child in module._modules.items() if child is not None})
        view.__dict__["_forward_hooks"] = module._forward_hooks.copy()
        if view.__dict__.get("config") is model.config:
            view.__dict__["config"] = config
        return view

    return cast(PreTrainedModel, apart(model))


def _seed(seed: int, piece: int) -> int:
    mixed = (seed + piece * _APART) % _SEEDS
    return mixed - _SEEDS if mixed >= _SEEDS // 2 else mixed


def _together(model: PreTrainedModel, result: Any, parts: list[Generation]) -> GenerateOutput:
    """Add lengths, stats and lossless to the output of the model's own `generate`."""
    if isinstance(result, GenerateOutput):
        found = result
    else:
        found = Transcript(**({"sequences": result} if isinstance(result, Tensor) else dict(result)))
    config = model.generation_config
    pad = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
    filling = torch.isin(found.sequences, torch.tensor([] if pad is None else pad, device=found.sequences.device))
    # Count the tokens before the padding at the end.
    found.lengths = tuple((~filling).flip(1).cumsum(1).gt(0).sum(1).tolist())
    found.stats = Stats.together([part.stats for part in parts]) if parts else Stats()
    found.lossless = all(part.lossless for part in parts)
    return found
