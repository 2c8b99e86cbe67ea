"""Multi-token prediction: the module that a checkpoint contains, read from the checkpoint's own files."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter, MtpLayout, OfModule
from selfspec.draft.drafter import Drafter, OwnBytes, drafter
from selfspec.draft.heads.folder import SCALE, HeadFolder, check_layout, dequantised, fill, format_spelled, output_layer
from selfspec.draft.heads.head import Fusion, Head, check_for_head, one_layer_config, text_alone, weight_bytes
from selfspec.draft.heads.pairs import HeadDrafter
from selfspec.errors import CheckpointError, HeadError
from selfspec.formats.format import Format
from selfspec.model.checkpoint import load_model
from selfspec.model.gated_view import Point
from selfspec.model.identity import weight_of
from selfspec.model.registry import find_adapter, mtp_layout
from selfspec.model.sizes import bytes_read, cache_bytes_of_token


class MtpFusion(Fusion):
    """Norms an embedding and a state by copies of `norm`, and projects both, the state first if `hidden_first`."""

    def __init__(self, norm: nn.Module, hidden: int, bias: bool, hidden_first: bool) -> None:
        super().__init__()
        self.embedding = copy.deepcopy(norm)
        self.hidden = copy.deepcopy(norm)
        self.projection = nn.Linear(2 * hidden, hidden, bias=bias, device="meta")
        self._hidden_first = hidden_first

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        parts = [self.embedding(embedded), self.hidden(state)]
        joined: Tensor = self.projection(torch.cat(parts[::-1] if self._hidden_first else parts, -1))
        return joined


@dataclass(frozen=True)
class _Module:
    """Describes a module in a checkpoint's files.

    `names` maps the checkpoint's names to their meanings, as in `MtpLayout.renamed`; `shapes` are by meaning, and leave
    out scales.
    """

    folder: HeadFolder
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def _config(self) -> Mapping[str, Any]:
        """The checkpoint's configuration; empty if the folder has no config.json, as with a module alone."""
        return self.folder.config() if (self.folder.path / "config.json").is_file() else {}

    def check(self, layout: MtpLayout, hidden: int) -> None:
        """Refuse a module that is incomplete, or that belongs to a model of another width."""
        shapes = self.shapes
        check_layout(shapes, self._config, str(self.folder.path))
        wanted = ["embedding", "hidden", "projection", *(["norm"] if layout.norm is not None else [])]
        missing = [part for part in wanted if f"{part}.weight" not in shapes]
        if missing or not any(name.startswith("block.") for name in shapes):
            raise HeadError(
                f"the files in {self.folder.path} have a part of a module for multi-token prediction and lack its "
                f"{(missing or ['layer'])[0]}; copy them from the original again"
            )
        if shapes["projection.weight"] != (hidden, 2 * hidden):
            raise HeadError(
                f"the module for multi-token prediction in {self.folder.path} is of width "
                f"{shapes['projection.weight'][0]}, and this model of {hidden}: it is another model's"
            )

    @torch.no_grad()
    def head(self, model: PreTrainedModel, layout: MtpLayout) -> Head:
        source = str(self.folder.path)
        read = {self.names[name]: weight for name, weight in self.folder.tensors(self.names).items()}
        weights = dequantised(read, self._config, source)
        config = _layer_config(model, layout)
        width = config.hidden_size
        # A multimodal model may have no class for its language model alone.
        alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        place = "model" if alone else ".".join(find_adapter(model).path(model)[:-1])
        block = {
            f"{place}.layers.0.{n.removeprefix('block.')}": w for n, w in weights.items() if n.startswith("block.")
        }
        block[f"{place}.norm.weight"] = weights.get("norm.weight", torch.ones(width))
        # Neither is read: the model's own embeddings and head replace them.
        block[f"{place}.embed_tokens.weight"] = block["lm_head.weight"] = torch.zeros(1, width)
        whole, kind = config, None
        if not alone:
            own = model.config.get_text_config(decoder=True)
            whole, kind = copy.deepcopy(model.config), text_alone(type(model))
            setattr(whole, next(name for name, part in vars(model.config).items() if part is own), config)
        try:
            layers = load_model(source, whole, model.dtype, block, kind).requires_grad_(False).eval()
        except CheckpointError as error:
            raise HeadError(str(error)) from error
        layers.to(model.device)
        adapter = find_adapter(layers)
        inside: Any = layers.get_submodule(place)
        fusion = MtpFusion(inside.norm, width, "projection.bias" in weights, layout.hidden_first)
        fill(fusion, weights, source)
        fusion.to(device=model.device, dtype=model.dtype)
        if layout.norm is None:
            inside.norm = nn.Identity()
        embed = model.get_input_embeddings()
        layers.set_input_embeddings(embed)
        layers.set_output_embeddings(output_layer(weights, "head.", model, source))
        return Head(fusion, layers, adapter, layout.recycles, embed, None)


@drafter("mtp", argument="[:FOLDER]", help="the module for multi-token prediction in the model's own checkpoint")
@dataclass(frozen=True)
class MultiTokenPrediction(HeadDrafter):
    """Drafts with the module that a checkpoint was trained with (MTP; DeepSeek-V3, 2024, arXiv 2412.19437).

    `transformers` leaves its weights out; they are read from the files that the model was loaded from. It drafts
    further tokens from its own states; of several modules the first drafts all tokens.

    Attributes:
        source: folder with the checkpoint; None: where the model was loaded from.
        weight_format: format of its linear layers; None: they have the dtype of the model.
    """

    source: str | None = None
    weight_format: Format | None = None

    @classmethod
    def variants(cls, depth: int) -> Sequence[Drafter]:
        return [cls()]

    def features(self, depth: int) -> tuple[Point, ...]:
        # The model's architecture says which of them is read.
        return ("last", "normed")

    def read_points(self, model: PreTrainedModel, depth: int) -> tuple[Point, ...]:
        return (_layout(model).reads,)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "a module for multi-token prediction", self.weight_format)
        self._module(model).check(_layout(model), model.config.get_text_config(decoder=True).hidden_size)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        # A draft step reads it and a head, which may be its own.
        return (self._bytes(model) + self._head_bytes(model)) / bytes_read(model, adapter)

    def saved_from(self, model: PreTrainedModel) -> Drafter:
        # `transformers` saves the model without its module.
        return replace(self, source=str(self._folder(model).path.resolve()))

    def in_format(self, format: Format) -> Drafter:
        return replace(self, weight_format=format)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        token = cache_bytes_of_token(_layer_config(model, _layout(model)), model.dtype)
        # In fewer bits, a copy of the model's head is kept.
        copied = 0 if self.weight_format is None else self._head_bytes(model)
        return OwnBytes(self._bytes(model) + copied, token)

    def _bytes(self, model: PreTrainedModel) -> int:
        return weight_bytes(self._module(model).shapes, model, self.weight_format)

    def _head_bytes(self, model: PreTrainedModel) -> int:
        """Count bytes of the model's head as the module reads it; 0 if it has a head of its own."""
        shapes = {} if _layout(model).head is not None else {"head": weight_of(model.get_output_embeddings()).shape}
        return weight_bytes(shapes, model, self.weight_format)

    def head(self, model: PreTrainedModel) -> Head:
        return self._module(model).head(model, _layout(model))

    def _module(self, model: PreTrainedModel) -> _Module:
        """Find the module in the files; refuse a checkpoint without one."""
        layout = _layout(model)
        folder = self._folder(model)
        config = model.config.get_text_config(decoder=True)
        shapes = folder.shapes()
        renamed = layout.renamed(shapes, config.num_hidden_layers)
        if not renamed:
            promised = layout.promised(config)
            raise HeadError(
                f"the files in {folder.path} have no module for multi-token prediction"
                + (f", though the config promises {promised}; download the checkpoint whole" if promised else "")
            )
        kept = {each: shapes[name] for name, each in renamed.items() if not name.endswith(SCALE)}
        return _Module(folder, renamed, kept)

    def _folder(self, model: PreTrainedModel) -> HeadFolder:
        if self.source is not None:
            return HeadFolder.at(self.source)
        # Within a memory budget, only the config knows the folder.
        found = map(folder_of, (model.name_or_path, model.config.name_or_path))
        folder = next((each for each in found if each is not None), None)
        if folder is None:
            raise HeadError(
                "a module for multi-token prediction is read from the files of the checkpoint, and this model was not "
                "loaded from a folder; write mtp:FOLDER"
            )
        return HeadFolder(folder)

    @property
    def spelling(self) -> str:
        return format_spelled(self.weight_format) + ("mtp" if self.source is None else f"mtp:{self.source}")


def folder_of(name: str) -> Path | None:
    """Return the folder with the files of a checkpoint; None: it is not on this machine."""
    if name and Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    cached = try_to_load_from_cache(name, "config.json") if name else None
    return Path(cached).parent if isinstance(cached, str) else None


def _layout(model: PreTrainedModel) -> MtpLayout:
    layout = mtp_layout(model.config)
    if layout is None:
        raise HeadError(
            f"checkpoints of {model.config.model_type!r} have no module for multi-token prediction that selfspec "
            "knows; see docs/heads.md"
        )
    return layout


def _layer_config(model: PreTrainedModel, layout: MtpLayout) -> PreTrainedConfig:
    """Return the configuration of a language model with the module's layer alone."""
    config = one_layer_config(model)
    for name, value in layout.config:
        if hasattr(config, name):
            found = getattr(config, value.name)[:1] if isinstance(value, OfModule) else value
            setattr(config, name, found)
    # Layers of one type may differ in further fields.
    own = model.config.get_text_config(decoder=True)
    differences = {int(layer): each for layer, each in (own.to_dict().get("per_layer_config") or {}).items()}
    if differences:
        config.per_layer_config = {0: differences.get(own.layer_types.index(config.layer_types[0]), {})}
    return config
