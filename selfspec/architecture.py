"""Declare where an architecture keeps its layers, so that its stock `transformers` model can be gated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.cache.shared_cache import SharedCache, recurrent_layers
from selfspec.cache.shared_layer import CacheKind
from selfspec.compat import forward_parameters
from selfspec.errors import UnsupportedModelError


class Part(IntEnum):
    """Names the two sublayers of a decoder layer, in the order in which they run."""

    ATTENTION = 0
    MLP = 1


_RAGGED, _WITHOUT = ("mask", "padding", "none"), ("zeros", "input", "residual")


@dataclass(frozen=True)
class Adapter:
    """Says where an architecture keeps its decoder layers and their two sublayers, and how it calls them.

    Attributes:
        model_types: the `config.model_type` values it serves.
        layers: attribute path from the causal LM to the `ModuleList` of decoder layers; `{base}` in it is the model's
            own `base_model_prefix`.
        attention: attribute or attributes of a decoder layer that hold its attention, or any other module that lets
            tokens see earlier tokens or the output of an encoder; a layer may lack some of several. An attribute here
            and in `mlp` may be a path, as in "layer.0.SelfAttention".
        recurrent: attributes of `attention` that keep a state in place of keys and values.
        mlp: attribute or attributes of a decoder layer that hold its MLP; a layer may lack some of several.
        layer_returns: number of values a decoder layer returns, the hidden states first; 1 is the bare tensor.
        attention_returns: number of values an attention returns; recurrent ones return a bare tensor.
        mlp_returns: number of values an MLP returns.
        without_attention: output of a skipped attention: "zeros" if its layer adds the output to the residual stream;
            "input" or "residual" if the attention adds the stream itself, and gets it as its first or last positional
            argument.
        without_mlp: output of a skipped MLP, as in `without_attention`.
        publishes: attribute of an attention that is true where later layers read its keys and values, so that it runs
            even if it is skipped, and only its output is dropped; None: layers share nothing.
        lends: attributes of the first layer's first attention whose results later layers get; views of later layers'
            attentions have them too, so that each can compute these results if no earlier layer runs.
        positions: attribute path, from the module that holds the layers, to a module that embeds positions and knows
            only the length of the cache; views of it know each row's position. None: the model takes position ids, or
            needs none.
        ragged: how rows of different lengths are kept apart: "mask", by a 4-D mask and position ids; "padding", by a
            padding mask, with keys and values aligned on the right; "none": only one row at a time is exact.
        requires: fields that the config must have, with their values.
    """

    model_types: tuple[str, ...]
    layers: str = "model.layers"
    attention: str | tuple[str, ...] = "self_attn"
    recurrent: tuple[str, ...] = ()
    mlp: str | tuple[str, ...] = "mlp"
    layer_returns: int = 1
    attention_returns: int = 2
    mlp_returns: int = 1
    without_attention: Literal["zeros", "input", "residual"] = "zeros"
    without_mlp: Literal["zeros", "input", "residual"] = "zeros"
    publishes: str | None = None
    lends: tuple[str, ...] = ()
    positions: str | None = None
    ragged: Literal["mask", "padding", "none"] = "mask"
    requires: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        for name in ("attention", "mlp", "recurrent"):
            given = getattr(self, name)
            listed = (given,) if isinstance(given, str) else given
            if not isinstance(listed, tuple) or not all(isinstance(each, str) and each for each in listed):
                raise UnsupportedModelError(f"an adapter's {name} is an attribute or a tuple of them, got {given!r}")
        if not isinstance(self.layers, str) or not self.layers:
            raise UnsupportedModelError(f"an adapter's layers are the path of an attribute, got {self.layers!r}")
        if not self.attention:
            raise UnsupportedModelError("an adapter names what lets tokens see those before them: attention=...")
        for name in ("layer_returns", "attention_returns", "mlp_returns"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise UnsupportedModelError(f"an adapter's {name} is at least 1, got {getattr(self, name)!r}")
        for name, known in (("ragged", _RAGGED), ("without_attention", _WITHOUT), ("without_mlp", _WITHOUT)):
            if getattr(self, name) not in known:
                raise UnsupportedModelError(f"an adapter's {name} is one of {known}, got {getattr(self, name)!r}")

    def shared_cache(
        self,
        model: PreTrainedModel,
        batch: int,
        limit: int,
        slack: int = 0,
        *,
        device: torch.device | None = None,
        bucket: int = 1,
        kept: CacheKind = "exact",
    ) -> SharedCache:
        """Make the cache for a model's passes, by default on its device; other arguments are as in `SharedCache`."""
        return SharedCache(
            len(self.decoder_layers(model)),
            batch,
            limit,
            slack,
            model.device if device is None else device,
            aligned="right" if self.ragged == "padding" else "left",
            recurrent=recurrent_layers(model.config) if self.recurrent else {},
            bucket=bucket,
            kept=kept,
        )

    def modules(self, part: Part) -> tuple[str, ...]:
        """Return all attributes of a decoder layer that may hold a sublayer, or a part of it."""
        names = self.attention if part is Part.ATTENTION else self.mlp
        return (names,) if isinstance(names, str) else names

    def modules_of(self, layer: nn.Module, part: Part) -> tuple[str, ...]:
        """Return the attributes in `modules` that a layer has."""
        return tuple(name for name in self.modules(part) if _holds(layer, name))

    def returns(self, attention: str) -> int:
        """Return the number of values that an attention returns."""
        return 1 if attention in self.recurrent else self.attention_returns

    def path(self, model: nn.Module) -> list[str]:
        """Return the attribute path, as a list, from the causal LM to its decoder layers."""
        return self.layers.format(base=getattr(model, "base_model_prefix", "")).split(".")

    def base(self, model: PreTrainedModel) -> str:
        """Return the attribute path to the part of a causal LM that holds its layers and all else except the head.

        Empty: the layers lie beside the head, and no part runs without it.
        """
        head, path = model.get_output_embeddings(), self.path(model)
        places = (".".join(path[:length]) for length in range(1, len(path)))
        # The model may hold a whole language model, with its head.
        return next((place for place in places if head not in modules_in(model.get_submodule(place))), "")

    def check(self, model: nn.Module) -> None:
        """Refuse a model that lacks a module or config value that this adapter names.

        Raises:
            UnsupportedModelError: it says what is missing.
        """
        for name, value in self.requires:
            if getattr(model.config, name, None) != value:
                raise UnsupportedModelError(
                    f"{type(model).__name__} drafts only where its config says {name}={value!r}; "
                    "set it when you load the model"
                )
        try:
            layers = model.get_submodule(".".join(self.path(model)))
        except AttributeError as error:
            raise UnsupportedModelError(f"the adapter's layers={self.layers!r} is not in the model: {error}") from error
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            raise UnsupportedModelError(f"the adapter's layers={self.layers!r} is no ModuleList of decoder layers")
        for layer in layers:
            lacking = [name for part in Part if not self.modules_of(layer, part) for name in self.modules(part)]
            if lacking:
                raise UnsupportedModelError(
                    f"the adapter names {lacking[0]!r}, which {type(layer).__name__} does not have; it has "
                    + ", ".join(child for child, _ in layer.named_children())
                )
        self._check_numbers(model, list(layers))

    def _check_numbers(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Refuse layers that were removed, repeated or renumbered: each needs a place of its own in the cache."""
        taken: dict[int, int] = {}
        for place, layer in enumerate(layers):
            numbers = {vars(module).get(name) for module in modules_in(layer) for name in ("layer_idx", "layer_id")}
            for number in (each for each in numbers if type(each) is int):
                if number >= len(layers) or taken.setdefault(number, place) != place:
                    name = ".".join(self.path(model))
                    said = f"as {name}.{taken[number]}" if number in taken else f"and there are {len(layers)} layers"
                    raise UnsupportedModelError(
                        f"{name}.{place} keeps its keys and values under layer_idx={number}, {said}; number the layers "
                        "anew: set layer_idx of each module of a layer to the layer's place, and num_hidden_layers of "
                        "the config to their number"
                    )
        config: Any = model.config
        fewer = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
        if not config.is_encoder_decoder and type(fewer) is int and fewer < len(layers):
            raise UnsupportedModelError(
                f"the config says num_hidden_layers={fewer}, and {'.'.join(self.path(model))} has {len(layers)} "
                "layers, some of which may never run; say their number in the config, or take the others out"
            )

    def check_trees(self, model: nn.Module) -> None:
        """Refuse a model that cannot read a tree of drafts, in which positions do not count up from token to token.

        Raises:
            UnsupportedModelError: it takes no position ids, or no mask for each token.
        """
        placed = self.ragged == "mask" and (self.positions is not None or takes_positions(model))
        # Recurrent states have neither positions nor masks.
        if not placed and set(self.modules(Part.ATTENTION)) != set(self.recurrent):
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot read a tree of drafts: it takes no position ids, or no mask for each "
                "token; draft a chain"
            )

    def decoder_layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the decoder layers of `model`, first to last."""
        layers = model.get_submodule(".".join(self.path(model)))
        assert isinstance(layers, nn.ModuleList)
        return list(layers)


@dataclass(frozen=True)
class OfModule:
    """Names a list in the model's config, with one value for each MTP module, of which the first is taken."""

    name: str


@dataclass(frozen=True)
class MtpLayout:
    """Says where the parts of the first MTP module lie in an architecture's checkpoints.

    It computes h' = block(projection [embedding norm (e) ; hidden norm (h)]) from a state h and the embedding e of the
    token after it; norm (h') goes through the model's head. In names `{n}` is the number of the model's layers;
    prefixes of a checkpoint's names are left out.
    """

    embedding: str = "layers.{n}.enorm"  # its norm over embeddings
    hidden: str = "layers.{n}.hnorm"  # its norm over states
    projection: str = "layers.{n}.eh_proj"
    norm: str | None = "layers.{n}.shared_head.norm"  # its final norm; None: it has none
    head: str | None = None  # its language-model head; None: it uses the model's
    block: str = "layers.{n}."  # prefix of the names in its decoder layer
    # Fields of the config for the number of modules; the first one present is used.
    counts: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    hidden_first: bool = False  # True if the projection reads [h ; e]
    reads: Literal["last", "normed"] = "normed"  # the state of the model that it reads: before or after the final norm
    recycles: Literal["last", "normed"] = "normed"  # the state of its own that it continues from
    renames: tuple[tuple[str, str], ...] = ()  # parts of names in the checkpoint, each with its name here or in layers
    config: tuple[
        tuple[str, Any], ...
    ] = ()  # values of its layer unlike the model's: lists for one layer, or `OfModule`

    def promised(self, config: object) -> int:
        """Return the number of modules in a config; 0 if it does not say."""
        found = (getattr(config, name, None) for name in self.counts)
        return next((count for count in found if type(count) is int), 0)

    def renamed(self, names: Iterable[str], depth: int) -> dict[str, str]:
        """Map names of its weights to `embedding`, `hidden`, `projection`, `norm`, `head` or `block.`, and their ends.

        The keys are the checkpoint's names; there are none if it has no module. The model has `depth` layers.
        """
        listed = {self._renamed(name): name for name in names}
        places = {part: getattr(self, part).format(n=depth) for part in ("embedding", "hidden", "projection")}
        norms = re.compile(rf"(?:.*\.)?{re.escape(places['embedding'])}\.weight")
        first = next((name for name in listed if norms.fullmatch(name)), None)
        if first is None:
            return {}
        before = first.removesuffix(f"{places['embedding']}.weight")
        optional = {"norm": self.norm, "head": self.head}
        places |= {part: place.format(n=depth) for part, place in optional.items() if place is not None}
        ends = (".weight", ".weight_scale_inv", ".bias")
        found = {f"{before}{place}{end}": part + end for part, place in places.items() for end in ends}
        block = before + self.block.format(n=depth)
        inside = {name: "block." + name.removeprefix(block) for name in listed if name.startswith(block)}
        # The embeddings and the head are the model's; some checkpoints have a copy of them here.
        rest = {
            name: other
            for name, other in inside.items()
            if name not in found and not other.startswith(("block.shared_head.", "block.embed_tokens."))
        }
        parts = {name: found[name] for name in listed if name in found} | rest
        return {listed[name]: part for name, part in parts.items()}

    def _renamed(self, name: str) -> str:
        for there, here in self.renames:
            name = name.replace(there, here)
        return name


def modules_in(module: nn.Module) -> dict[nn.Module, None]:
    """Return a module and all in it, each once, in the order of its `modules()`, which takes many times as long."""
    found: dict[nn.Module, None] = {}
    left: list[nn.Module | None] = [module]
    while left:
        each = left.pop()
        if each is not None and each not in found:
            found[each] = None
            left.extend(reversed(each._modules.values()))
    return found


def _holds(layer: nn.Module, path: str) -> bool:
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def takes_positions(model: nn.Module) -> bool:
    """Return whether a model's `forward` takes position ids of its text: the decoder's where there is an encoder."""
    return takes(model, "position_ids") or takes(model, "decoder_position_ids")


def takes(model: nn.Module, name: str) -> bool:
    """Return whether a model's `forward` has a parameter of that name."""
    return name in forward_parameters(model)
