"""Published heads of decoder layers over states of several layers of the target: what EAGLE and DFlash share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.drafter import OwnBytes
from selfspec.draft.heads.folder import FromFolder
from selfspec.draft.heads.head import check_for_head, layer_config, step_bytes, weight_bytes
from selfspec.draft.heads.pairs import HeadDrafter
from selfspec.errors import HeadError
from selfspec.model.gated_view import Point
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.sizes import bytes_read, cache_bytes_of_token

# Tables beside the weights.
_TABLES = ("d2t", "t2d")


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """Describes the layers of a head, read from its folder."""

    layers: Mapping[str, Any]  # fields of their configuration
    points: tuple[int, ...]  # numbers of the target's layers whose inputs it reads; empty: the usual three
    end: Literal["last", "normed"] = "last"  # state that it reads where such a number is the model's depth
    target: int | None = None  # width of the target; None: its own
    drafted: int | None = None  # number of tokens it drafts from; None: the folder does not say
    mask: int | None = None  # token in the place of unknown tokens; None: it reads none
    base: str = ""  # name of the model that it was trained for, for messages; empty: unknown


@dataclass(frozen=True)
class LayersFromFolder(FromFolder, HeadDrafter):
    """Drafts with published layers, whose weight `fc` joins states of the target, and embeddings if it reads them."""

    _config: LayersConfig = field(init=False, repr=False, compare=False)

    @property
    def levels(self) -> int:
        """Number of draft tokens for which a draft step reads the weights once."""
        return 1

    def features(self, depth: int) -> tuple[Point, ...]:
        chosen = self._config.points or (2, depth // 2, depth - 3)
        # The input of the layer after the last one is the output of the last.
        return tuple(self._config.end if point == depth else point for point in chosen)

    def check(self, depth: int) -> None:
        beyond = [point for point in self._config.points if point > depth]
        if beyond:
            raise HeadError(f"{self.source} reads layer {beyond[0]}, and this model has {depth}: it is for another one")

    @property
    def joined(self) -> int:
        """Number of states and embeddings that `fc` joins."""
        return len(self._config.points) or 3

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "a draft head", self.weight_format)
        config, shapes, (known, hidden) = self._config, self._shapes, weight_of(model.get_input_embeddings()).shape
        (own, read), wanted = shapes["fc.weight"], self.joined * hidden
        foreign = config.target not in (None, hidden)
        if foreign or read != wanted or (own != hidden and "embed_tokens.weight" not in shapes):
            differs = f"its fc reads {read} numbers, and this model of width {hidden} gives {wanted}"
            if foreign:
                differs = f"one of width {config.target}, and this one has {hidden}"
            raise self.foreign(differs + (f"; it is for {config.base}" if config.base else ""))
        known = shapes.get("embed_tokens.weight", (known,))[0]
        if config.mask is not None and config.mask >= known:
            raise self.foreign(f"it masks with token {config.mask}, and this model knows {known}")
        # Its tokens must be those that the head drafts from.
        size = vocabulary_size(model)
        head = shapes.get("lm_head.weight", (size,))[0]
        if "d2t" in shapes and shapes["d2t"] != (head,):
            raise HeadError(f"{self.source} maps {shapes['d2t'][0]} tokens, and its head has {head}")
        known = shapes.get("t2d", (size,))[0]
        if known != size or ("d2t" not in shapes and head > size):
            of = f"of {known} " if known != size else ""
            raise self.foreign(f"it drafts {head} {of}tokens, and this model knows {size}")
        if "d2t" not in shapes and head < size and self._config.drafted == head:
            raise HeadError(f"{self.source} drafts {head} of {size} tokens, and lacks d2t, which says which")

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        read = self._without("embed_tokens.weight", *_TABLES)
        return step_bytes(read, model, self.weight_format) / bytes_read(model, adapter) / self.levels

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        # Embeddings are kept if they differ from the model's; the shapes do not tell, so they count.
        kept, format = self._without(*_TABLES), self.weight_format
        # In a format there is a copy of the model's head as well.
        size = weight_bytes(kept, model, None) if format is None else step_bytes(kept, model, format)
        token = cache_bytes_of_token(self.layers_config(), model.dtype)
        return OwnBytes(size, token, token * self.block)

    def layers_config(self) -> PreTrainedConfig:
        numbers = [int(name.split(".")[1]) for name in self._shapes if name.startswith("layers.")]
        return layer_config({**self._config.layers, "num_hidden_layers": 1 + max(numbers)}, self.source)

    def _without(self, *names: str) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._shapes.items() if name not in names}
