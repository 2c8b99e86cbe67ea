"""Check prompts and masks; drop inputs beside the text without effect, and pass the rest to the stock model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from selfspec.architecture import Adapter, takes_positions
from selfspec.cache.shared_cache import recurrent_layers
from selfspec.cache.source import Source, source_of
from selfspec.cache.transfer import holds_anything, is_callers, past_length, past_of
from selfspec.compat import cache_argument
from selfspec.decode.options import follow_from, has_values, unsupported
from selfspec.errors import PromptError, UnsupportedModelError, UnsupportedOptionError
from selfspec.model.identity import weight_of
from selfspec.model.positions import boundaries
from selfspec.model.view import hidden_states, replaced, view_with_layers


def checked_ids(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """Return the prompts as 64-bit ids, `[batch, prompt]`; refuse shapes, dtypes and ids that do not fit."""
    _check_dense("input_ids", inputs)
    if not isinstance(inputs, Tensor) or inputs.dtype not in (torch.int64, torch.int32):
        raise PromptError("input_ids must be a LongTensor of shape [batch, prompt]; tokenize with return_tensors='pt'")
    input_ids = inputs.long()
    if input_ids.ndim != 2:
        raise PromptError(
            f"input_ids has shape {list(inputs.shape)}, not [batch, prompt]; for a single prompt write input_ids[None]"
        )
    if input_ids.numel() == 0:
        raise PromptError(f"the prompt is empty (input_ids of shape {list(inputs.shape)}); give at least the bos token")
    # Some modules that replace an embedding have no num_embeddings.
    vocabulary = weight_of(model.get_input_embeddings()).shape[0]
    lowest, highest = input_ids.min().item(), input_ids.max().item()
    if lowest < 0 or highest >= vocabulary:
        raise PromptError(
            f"token id {int(lowest if lowest < 0 else highest)} is outside the vocabulary 0..{vocabulary - 1}; "
            "is this the model's own tokenizer?"
        )
    return input_ids


def checked_embeddings(model: PreTrainedModel, embeddings: Tensor) -> Tensor:
    """Return the prompts as embeddings, `[batch, prompt, hidden]`; refuse others than the model's own kind."""
    own = weight_of(model.get_input_embeddings())
    wanted = f"a tensor of {own.dtype} of shape [batch, prompt, {own.shape[1]}], as the model's own are"
    if not isinstance(embeddings, Tensor) or embeddings.dtype != own.dtype:
        given = embeddings.dtype if isinstance(embeddings, Tensor) else repr(embeddings)
        raise PromptError(f"inputs_embeds must be {wanted}, got {given}")
    _check_dense("inputs_embeds", embeddings)
    if embeddings.ndim != 3 or embeddings.shape[2] != own.shape[1] or embeddings.numel() == 0:
        raise PromptError(f"inputs_embeds must be {wanted}, got shape {list(embeddings.shape)}")
    return embeddings


def checked_mask(attention_mask: Tensor, read: Tensor, past: Cache | None) -> Tensor:
    """Return the mask, 1 for tokens, of a past's columns and then of the prompts, `[batch, columns]`.

    Prompts begin with the past's tokens or after them. Refuses other shapes or values, empty rows, and padding right.
    """
    rows, columns = read.shape[:2]
    known = 0 if past is None else past_length(past)
    name = "inputs_embeds" if read.is_floating_point() else "input_ids"
    if not isinstance(attention_mask, Tensor):
        raise PromptError(f"attention_mask must be a tensor of the shape of {name}, got {attention_mask!r}")
    _check_dense("attention_mask", attention_mask)
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise PromptError("attention_mask may hold nothing but 1 for tokens and 0 for padding")
    if attention_mask.shape not in ((rows, columns), (rows, columns + known)):
        raise PromptError(
            f"attention_mask has shape {list(attention_mask.shape)}, {name} {list(read.shape[:2])}; they must agree"
            + (f", or the mask must also cover the {known} columns of the cache" if known else "")
        )
    mask = (attention_mask.to(read.device) != 0).long()
    if mask.shape[1] <= known:
        raise PromptError(
            f"the cache holds {known} tokens and {name} {columns}; pass the whole conversation as {name}, "
            "with at least one token that is not in the cache"
        )
    if not bool(mask[:, known:].any(1).all()):
        rows_of_zeros = (~mask[:, known:].any(1).bool()).nonzero().flatten().tolist()
        raise PromptError(
            f"row(s) {rows_of_zeros} of the attention mask are all zero; drop these rows or give them a token"
        )
    if not bool(mask[:, -1].all()):
        raise PromptError(
            "the attention mask ends with zeros; pad on the left: AutoTokenizer.from_pretrained(..., "
            "padding_side='left'). Without a mask, `transformers` takes the padding token for padding wherever it is: "
            "pass attention_mask=torch.ones_like(input_ids) if it is text"
        )
    return mask


def _check_dense(name: str, value: object) -> None:
    if isinstance(value, Tensor) and not has_values(value):
        raise PromptError(f"{name} is a tensor without values (meta, sparse or nested); pass a dense one")


def first_inputs(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the first pass, from those that `generate` prepared, with a soft prompt if there is one.

    Libraries of soft prompts replace `prepare_inputs_for_generation` while `generate` runs, to return embeddings or a
    cache with a prefix; a `custom_generate` must call it. Raises UnsupportedModelError if it adds no soft prompt, and
    UnsupportedOptionError beside a caller's cache or for padded rows without position_ids.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    # Such a library later leaves the model's own method set on the instance.
    if prepare is None or getattr(prepare, "__func__", None) is type(model).prepare_inputs_for_generation:
        return {**model_kwargs, "input_ids": input_ids}
    past = past_of(model_kwargs)
    if past is not None and is_callers(past) and holds_anything(past):
        raise UnsupportedOptionError(
            "a cache beside a soft prompt is not supported: it does not say which of its columns the soft "
            "prompt takes; pass the whole conversation as input_ids alone"
        )
    inputs: dict[str, Any] = prepare(input_ids, is_first_iteration=True, **model_kwargs)
    past = past_of(inputs)
    # The caller's own prompt may be embeddings, too.
    embedded = inputs.get("inputs_embeds") is not None and model_kwargs.get("inputs_embeds") is None
    if not embedded and (past is None or not holds_anything(past)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a prepare_inputs_for_generation of its own, which adds no soft prompt and "
            "would not be called for later tokens; use model.generate, or do the same in forward or in a hook"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and inputs.get("position_ids") is None and bool((mask == 0).any()):
        raise UnsupportedOptionError(
            "a soft prompt before padded rows is not supported: without position_ids, which it drops, padding counts "
            "as positions; pass rows of one length, or one row at a time"
        )
    return inputs


# Inputs that belong to the text or configure a call.
_OF_TEXT = frozenset(
    {
        "input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "logits_to_keep",
        "output_attentions", "output_hidden_states",
    }
)  # fmt: skip


def beside_text(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Select the inputs of a model that are not part of its text."""
    return {
        name: value
        for name, value in inputs.items()
        # For models that read images, `transformers` adds an empty mapping for the outputs of their encoders.
        if name not in _OF_TEXT and value is not None and not isinstance(value, Cache) and value != {}
    }


def moves_positions(model: PreTrainedModel, inputs: Mapping[str, Any], mask: Tensor) -> bool:
    """Return whether prompts have positions of their own, from which those of new tokens continue."""
    positions = inputs.get("position_ids")
    return (
        positions is not None
        and positions.shape == mask.shape
        and not follow_from(positions, mask, mask.shape[1])
        # Rotary tables that change with the length would read such positions as the length.
        and not boundaries(model.config.get_text_config(decoder=True))
    )


def change_nothing(model: PreTrainedModel, adapter: Adapter, inputs: Mapping[str, Any], mask: Tensor) -> bool:
    """Return whether the decoder layers get the same inputs with and without the inputs beside the text."""
    others = beside_text(inputs)
    if past_of(inputs) is not None or any(each is not None and each.is_floating_point() for each in _parts(others)):
        return False
    text = {"input_ids": inputs["input_ids"], "attention_mask": mask, "use_cache": False}
    with _refusing(others):
        return same(layer_inputs(model, adapter, text | others), layer_inputs(model, adapter, text))


@torch.no_grad()
def read_by_stock(
    model: PreTrainedModel, adapter: Adapter, inputs: Mapping[str, Any], mask: Tensor
) -> tuple[DynamicCache, tuple[int, ...]]:
    """Read prompts with the inputs beside their text, such as images, by the stock model.

    Returns keys, values and states without each prompt's last token, and its new tokens' position ids minus index.
    Refuses inputs that it cannot read, that would change later tokens too, or that come with a prompt partly read.
    """
    others = beside_text(inputs) or {"position_ids": inputs["position_ids"]}
    if past_of(inputs) is not None or inputs.get("inputs_embeds") is not None:
        raise unsupported(next(iter(others)))
    ids, columns = inputs["input_ids"], mask.shape[1]
    options = {name: value for name, value in inputs.items() if name != "input_ids" and not isinstance(value, Cache)}
    options |= {"attention_mask": mask, "use_cache": True}
    config = model.config.get_text_config(decoder=True)
    # Recurrent states cannot be rolled back, so the last token stays unread there; elsewhere images may see it.
    stateful = bool(recurrent_layers(config))
    past = DynamicCache(config=config) if stateful else DynamicCache()
    read, cached = (columns - 1 if stateful else columns), cache_argument(model)
    with _refusing(others):
        first = {name: _columns(value, columns, read) for name, value in options.items()}
        prepared = model.prepare_inputs_for_generation(
            ids[:, :read], is_first_iteration=True, **{cached: past}, **first
        )
        model(**prepared, return_dict=True)
        if not stateful:
            past.crop(-1)
        step = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1, is_first_iteration=False, **{cached: past}, **options
        )
        counts = mask.sum(1) - 1
        positions = step.get("position_ids")
        offsets = torch.zeros_like(counts)
        if positions is not None:
            offsets = positions.reshape(-1, positions.shape[-2], 1)[-1, :, 0].to(mask.device) - counts
        plain = {
            "input_ids": ids[:, -1:],
            cached: past,
            "attention_mask": mask,
            "use_cache": True,
            **({} if positions is None else {"position_ids": (counts + offsets)[:, None]}),
        }
        if not same(layer_inputs(model, adapter, step), layer_inputs(model, adapter, plain)):
            raise UnsupportedOptionError(
                f"{', '.join(others)}: {type(model).__name__} gives its layers other inputs for tokens after such "
                "a prompt as well; use model.generate"
            )
    return past, tuple(offsets.tolist())


@contextmanager
def _refusing(others: Mapping[str, Any]) -> Iterator[None]:
    """Turn the stock model's errors about inputs beside its text into a refusal that names the inputs."""
    try:
        yield
    except UnsupportedOptionError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise UnsupportedOptionError(f"{', '.join(others)} cannot be read by the model: {error}") from error


def _columns(value: Any, columns: int, read: int) -> Any:
    """Return the first `read` columns of a value that has one column per token; other values as they are."""
    whole = isinstance(value, Tensor) and not value.is_floating_point() and value.ndim in (2, 3)
    return value[..., :read] if whole and value.shape[-1] == columns else value


def layer_inputs(model: PreTrainedModel, adapter: Adapter, inputs: Mapping[str, Any]) -> list[Any]:
    """List the inputs of the decoder layers in a call; layers pass states through, and no cache is written."""
    given: list[Any] = []
    layers = [replaced(layer, partial(_note, given, adapter.layer_returns)) for layer in adapter.decoder_layers(model)]
    view = view_with_layers(model, adapter.path(model), layers)
    with torch.no_grad():
        view(**inputs)
    return given


def same(first: list[Any], second: list[Any]) -> bool:
    """Return whether two calls give the decoder layers the same inputs."""
    return len(first) == len(second) and all(
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is other
        for one, other in zip(first, second, strict=True)
    )


def _note(given: list[Any], returns: int, *args: Any, **kwargs: Any) -> Any:
    # Positions add nothing to the rotary tables made of them.
    made = kwargs.get("position_embeddings") is not None
    given.extend(
        _parts([args, {name: value for name, value in kwargs.items() if not (made and name == "position_ids")}])
    )
    hidden = hidden_states(args, kwargs)
    return hidden if returns == 1 else (hidden, *[None] * (returns - 1))


def _parts(value: Any) -> Iterator[Tensor | None]:
    """Yield the tensors of nested arguments, and None for each None."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from _parts(value[name])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part)
    elif isinstance(value, Tensor) or value is None:
        yield value


# The names that decoder-only models have for these inputs.
_OF_DECODER = {"decoder_attention_mask": "attention_mask", "decoder_position_ids": "position_ids"}


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
    """Read a call's encoder output, from inputs that `generate` prepared; `read` is the encoder's input before repeats.

    Refuses a caller's cache, options not supported with an encoder, and padding where the model counts it as text.
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
    tokens = read is not None and read.ndim == 2 and not read.is_floating_point()
    if read is not None and tokens and not bool((read < 0).any()) and _shares_vocabulary(model):
        source.text = _text(read, source)
    return source


def _shares_vocabulary(model: PreTrainedModel) -> bool:
    """Return whether encoder and decoder use the same token ids, since they share their embeddings."""
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
    """Return cross-attention weights, `[rows, heads, tokens, places]`, for each pass of plain decoding and each layer.

    One stock pass reads `text`, `[rows, length]`, but its last token; `mask` is that of its prompts, `[rows, prompt]`.
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
