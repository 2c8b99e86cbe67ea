"""What an architecture has to declare so that its stock `transformers` model can be gated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.cache.shared_cache import SharedCache, recurrent_layers
from selfspec.cache.shared_layer import CacheKind
from selfspec.compat import forward_parameters
from selfspec.errors import UnsupportedModelError


class Part(IntEnum):
    """The two sublayers of a decoder layer, in the order in which they run."""

    ATTENTION = 0
    MLP = 1


_RAGGED, _WITHOUT = ("mask", "padding", "none"), ("zeros", "input", "residual")


@dataclass(frozen=True)
class Adapter:
    """Where an architecture keeps its decoder layers and their two sublayers, and how it calls them.

    Attributes:
        model_types: the `config.model_type` values it serves.
        layers: attribute path from the causal LM to the `ModuleList` of decoder layers; `{base}` in it means the
            model's own `base_model_prefix`.
        attention: attribute, or attributes, of a decoder layer that hold its attention, or whatever else lets tokens
            see those before them, or what an encoder has read. A layer may lack some of several. An attribute here and
            in `mlp` may be a path of several, as in "layer.0.SelfAttention".
        recurrent: those of `attention` that keep a state in place of keys and values.
        mlp: attribute, or attributes, of a decoder layer that hold its MLP. A layer may lack some of several.
        layer_returns: number of values a decoder layer returns, the hidden states first; 1: the bare tensor.
        attention_returns: the same of an attention; what is recurrent returns a bare tensor.
        mlp_returns: the same of an MLP.
        without_attention: what an attention left out gives. "zeros", if its layer adds the output to the residual
            stream; "input" or "residual", if the attention adds the stream itself, and finds it in its first or in its
            last positional argument.
        without_mlp: the same of an MLP.
        publishes: attribute of an attention that is true where later layers read its keys and values. Such an
            attention runs though it is left out, and only its output is dropped. None: layers share nothing.
        lends: attributes of the first layer's first attention that later layers have the use of, since it hands on what
            it makes of them. Views of their attentions have them too, so that each can make it where no layer before
            it runs.
        positions: attribute path, from what holds the layers, to a module that embeds positions and is told nothing of
            them but the length of the cache. Views of it are told where each row is. None: the model takes position
            ids, or needs none.
        ragged: how rows of different lengths are kept apart. "mask": the model takes a 4-D mask and position ids.
            "padding": it makes both of a padding mask, and reads keys and values aligned on the right. "none": it
            cannot, so that only one row at a time is exact.
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
        """Make the cache that a model's passes need. `device` is the model's by default; the rest as in the class."""
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
        """Every attribute of a decoder layer that may hold one of its sublayers, or a part of it."""
        names = self.attention if part is Part.ATTENTION else self.mlp
        return (names,) if isinstance(names, str) else names

    def modules_of(self, layer: nn.Module, part: Part) -> tuple[str, ...]:
        """Those of `modules` that a layer has."""
        return tuple(name for name in self.modules(part) if _holds(layer, name))

    def returns(self, attention: str) -> int:
        """Number of values that one of the attentions returns."""
        return 1 if attention in self.recurrent else self.attention_returns

    def path(self, model: nn.Module) -> list[str]:
        """The attributes that lead from the causal LM to its decoder layers."""
        return self.layers.format(base=getattr(model, "base_model_prefix", "")).split(".")

    def base(self, model: PreTrainedModel) -> str:
        """The attribute path to the part of a causal LM that holds its layers and all else but the head."""
        head, path = model.get_output_embeddings(), self.path(model)
        places = (".".join(path[:length]) for length in range(1, len(path)))
        # A language model may be inside with its head.
        return next(
            place for place in places if all(module is not head for module in model.get_submodule(place).modules())
        )

    def check(self, model: nn.Module) -> None:
        """Refuse a model that does not have what this adapter names.

        Raises:
            UnsupportedModelError: naming what is missing.
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
        """Refuse layers that were taken out, put twice or numbered in another way: each needs a place in the cache.

        Raises:
            UnsupportedModelError: naming the layer and its number.
        """
        taken: dict[int, int] = {}
        for place, layer in enumerate(layers):
            numbers = {vars(module).get(name) for module in layer.modules() for name in ("layer_idx", "layer_id")}
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
        # States know neither positions nor masks.
        if not placed and set(self.modules(Part.ATTENTION)) != set(self.recurrent):
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot read a tree of drafts: it takes no position ids, or no mask for each "
                "token; draft a chain"
            )

    def decoder_layers(self, model: nn.Module) -> list[nn.Module]:
        """The decoder layers of `model`, first to last."""
        layers = model.get_submodule(".".join(self.path(model)))
        assert isinstance(layers, nn.ModuleList)
        return list(layers)


@dataclass(frozen=True)
class OfModule:
    """A value that a list in the model's config has for each module for multi-token prediction.

    Attributes:
        name: of the list.
    """

    name: str


@dataclass(frozen=True)
class MtpLayout:
    """Where the parts of an MTP module lie in an architecture's checkpoints.

    Module i makes h' = block(projection [embedding norm (e) ; hidden norm (h)]) of a state h and the embedding e of the
    token after it; norm (h') goes through the model's head. In names `{i}` is the number of a module, and `{n}` the
    same counted on from the model's layers; what a checkpoint has before a name is left out.

    Attributes:
        embedding: its norm over embeddings.
        hidden: its norm over states.
        projection: a linear layer.
        norm: its final norm; None: it has none.
        head: its language-model head; None: it is the model's.
        block: what the names of its decoder layer begin with.
        counts: fields of the config that say how many modules there are; the first that is there counts.
        hidden_first: whether the projection reads [h ; e].
        reads: which state of the model it reads: before or after the final norm.
        recycles: which state of its own it goes on from.
        passes_on: which states the module behind it reads: those that it made, or those that it read.
        renames: parts of names in the checkpoint, and what stands for them here or in the model's own layers.
        config: what the config of its layer has other than the model's: lists for one layer, or `OfModule`.
    """

    embedding: str = "layers.{n}.enorm"
    hidden: str = "layers.{n}.hnorm"
    projection: str = "layers.{n}.eh_proj"
    norm: str | None = "layers.{n}.shared_head.norm"
    head: str | None = None
    block: str = "layers.{n}."
    counts: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    hidden_first: bool = False
    reads: Literal["last", "normed"] = "normed"
    recycles: Literal["last", "normed"] = "normed"
    passes_on: Literal["made", "read"] = "made"
    renames: tuple[tuple[str, str], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()

    def promised(self, config: object) -> int:
        """How many modules a config says there are; 0 where it says nothing."""
        found = (getattr(config, name, None) for name in self.counts)
        return next((count for count in found if type(count) is int), 0)

    def held(self, names: Iterable[str], depth: int) -> int:
        """Count the modules that some names are of, in a checkpoint of a model of `depth` layers."""
        listed = list(names)
        # Of some, all modules share the norms and the projection.
        modules = (self.renamed(listed, depth, module).values() for module in count())
        return next(
            number for number, parts in enumerate(modules) if not any(part.startswith("block.") for part in parts)
        )

    def renamed(self, names: Iterable[str], depth: int, module: int = 0) -> dict[str, str]:
        """Map names of a module's weights to `embedding`, `hidden`, `projection`, `norm`, `head`, `block.`, and ends.

        Args:
            names: of a checkpoint.
            depth: layers of the model.
            module: its number.

        Returns:
            By the checkpoint's names; empty where it has no such module.
        """
        listed = {self._renamed(name): name for name in names}
        places = {part: self._at(getattr(self, part), depth, module) for part in ("embedding", "hidden", "projection")}
        norms = re.compile(rf"(?:.*\.)?{re.escape(places['embedding'])}\.weight")
        first = next((name for name in listed if norms.fullmatch(name)), None)
        if first is None:
            return {}
        before = first.removesuffix(f"{places['embedding']}.weight")
        optional = {"norm": self.norm, "head": self.head}
        places |= {part: self._at(place, depth, module) for part, place in optional.items() if place is not None}
        ends = (".weight", ".weight_scale_inv", ".bias")
        found = {f"{before}{place}{end}": part + end for part, place in places.items() for end in ends}
        block = before + self._at(self.block, depth, module)
        inside = {name: "block." + name.removeprefix(block) for name in listed if name.startswith(block)}
        # The embeddings and the head are the model's, of which some checkpoints have a copy here.
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

    @staticmethod
    def _at(place: str, depth: int, module: int) -> str:
        return place.format(i=module, n=depth + module)


def _holds(layer: nn.Module, path: str) -> bool:
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def takes_positions(model: nn.Module) -> bool:
    """Whether a model's `forward` takes position ids of its text, which is its decoder's where it has an encoder."""
    return takes(model, "position_ids") or takes(model, "decoder_position_ids")


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model's `forward` has a parameter of that name."""
    return name in forward_parameters(model)
