"""Multi-token prediction: the module that a checkpoint contains, read from the checkpoint's own files."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from selfspec.architecture import Adapter, MtpLayout, OfModule
from selfspec.cache.tree import Tree
from selfspec.draft.drafter import Drafter, OwnBytes, drafter
from selfspec.draft.heads.folder import SCALE, HeadFolder, check_layout, dequantised, fill, format_spelled, output_layer
from selfspec.draft.heads.head import Fusion, Head, check_for_head, one_layer_config, text_alone, weight_bytes
from selfspec.draft.heads.pairs import HeadDrafter, PairProposer
from selfspec.draft.rows_view import RowsView
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

    number: int
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
        config = _layer_config(model, layout, self.number)
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
        return Head(fusion, layers, adapter, layout.recycles, embed, None, passes_on=layout.passes_on)


@drafter("mtp", argument="[:FOLDER]", help="the module for multi-token prediction in the model's own checkpoint")
@dataclass(frozen=True)
class MultiTokenPrediction(HeadDrafter):
    """Drafts with the module that a checkpoint was trained with (MTP; DeepSeek-V3, 2024, arXiv 2412.19437).

    `transformers` leaves its weights out; they are read from the files that the model was loaded from. Of several
    modules, each drafts its own token, and the last one drafts all further tokens, too, from its own states.

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
        for module in self._modules(model):
            module.check(_layout(model), model.config.get_text_config(decoder=True).hidden_size)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        modules = self._modules(model)
        # A draft step reads one of them, and a head, which may be its own.
        size = self._bytes(modules, model) // len(modules) + self._head_bytes(model)
        return size / bytes_read(model, adapter)

    def saved_from(self, model: PreTrainedModel) -> Drafter:
        # `transformers` saves the model without its modules.
        return replace(self, source=str(self._folder(model).path.resolve()))

    def in_format(self, format: Format) -> Drafter:
        return replace(self, weight_format=format)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        modules = self._modules(model)
        own = [_layer_config(model, _layout(model), module.number) for module in modules]
        token = sum(cache_bytes_of_token(each, model.dtype) for each in own)
        # In fewer bits, a copy of the model's head is kept.
        copied = 0 if self.weight_format is None else self._head_bytes(model)
        return OwnBytes(self._bytes(modules, model) + copied, token)

    def _bytes(self, modules: Sequence[_Module], model: PreTrainedModel) -> int:
        return sum(weight_bytes(each.shapes, model, self.weight_format) for each in modules)

    def _head_bytes(self, model: PreTrainedModel) -> int:
        """Count bytes of the model's head as the modules read it; 0 if they have heads of their own."""
        shapes = {} if _layout(model).head is not None else {"head": weight_of(model.get_output_embeddings()).shape}
        return weight_bytes(shapes, model, self.weight_format)

    def proposer(self, rows: RowsView, heads: Sequence[Head]) -> PairProposer:
        return ModulesInOrder(self, rows, heads) if len(heads) > 1 else PairProposer(self, rows, heads)

    def heads(self, model: PreTrainedModel) -> Sequence[Head]:
        return [module.head(model, _layout(model)) for module in self._modules(model)]

    def _modules(self, model: PreTrainedModel) -> list[_Module]:
        """Find the modules in the files; refuse a checkpoint without one."""
        layout = _layout(model)
        folder = self._folder(model)
        config = model.config.get_text_config(decoder=True)
        shapes = folder.shapes()
        # A module without a layer counts as well, so that the error can name the missing layer.
        count = max(layout.held(shapes, config.num_hidden_layers), 1)
        renamed = [layout.renamed(shapes, config.num_hidden_layers, module) for module in range(count)]
        if not renamed[0]:
            promised = layout.promised(config)
            raise HeadError(
                f"the files in {folder.path} have no module for multi-token prediction"
                + (f", though the config promises {promised}; download the checkpoint whole" if promised else "")
            )
        kept = ({each: shapes[name] for name, each in names.items() if not name.endswith(SCALE)} for names in renamed)
        return [_Module(number, folder, *each) for number, each in enumerate(zip(renamed, kept, strict=True))]

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


def _layer_config(model: PreTrainedModel, layout: MtpLayout, module: int) -> PreTrainedConfig:
    """Return the configuration of a language model with a module's layer alone."""
    config = one_layer_config(model)
    for name, value in layout.config:
        if hasattr(config, name):
            found = [getattr(config, value.name)[module]] if isinstance(value, OfModule) else value
            setattr(config, name, found)
    # Layers of one type may differ in further fields.
    own = model.config.get_text_config(decoder=True)
    differences = {int(layer): each for layer, each in (own.to_dict().get("per_layer_config") or {}).items()}
    if differences:
        config.per_layer_config = {0: differences.get(own.layer_types.index(config.layer_types[0]), {})}
    return config


class ModuleProposer(PairProposer):
    """Drafts with one module, which may begin a draft at nodes that the modules before it guessed."""

    # States read for the root and the nodes, if the module behind reads these too.
    _read: Tensor | None = None

    @property
    def passed_on(self) -> Tensor:
        """States of the root and the nodes that the module behind it reads, `[rows, nodes, hidden]`."""
        passed = self._states if self.head.passes_on == "made" else self._read
        assert passed is not None
        return passed

    def after_text(self, rows: RowsView, tree: Tree) -> Tensor:
        logits = super().after_text(rows, tree)
        if self.following is not None and self.head.passes_on == "read":
            self._read = self._next_pairs(rows, 1)[1]
        return logits

    def after_nodes(self, rows: RowsView, before: ModuleProposer, tokens: Tensor, first: int) -> Tensor:
        """Read the text, then nodes with states of the module `before`; return the logits from node `first` on."""
        self._catch_up(rows, 0)
        self._tree = before._tree
        root, states = self._next_pairs(rows, 1)
        parents = [self._tree.parents[node] + 1 for node in range(tokens.shape[1])]
        self._read = torch.cat([states, before.passed_on[:, parents]], 1)
        inputs = self.head.fusion.inputs(self.head.embed(torch.cat([root, tokens], 1)), self._read)
        self._cache.open(self._tree)
        logits, self._states = self._run(inputs, first=-1)
        self._note_first_read()
        return self.head.spread(logits[:, first + 1 :], self._vocabulary)


class ModulesInOrder(ModuleProposer):
    """Drafts with several modules in order, each in passes of its own.

    Module j reads a token and the state that module j - 1 made of the token before it: the nodes of a draft down to
    depth j - 1, with keys and values of its own. Deeper, the last module reads its own states.
    """

    parts: Sequence[ModuleProposer]

    def __init__(self, drafter: HeadDrafter, rows: RowsView, heads: Sequence[Head]) -> None:
        super().__init__(drafter, rows, heads)
        self.parts = [ModuleProposer(drafter, rows, [head]) for head in heads[1:]]
        for module, following in pairwise(self._modules):
            module.following = following

    @property
    def _modules(self) -> list[ModuleProposer]:
        # An attribute would be a reference cycle.
        return [self, *self.parts]

    @property
    def nbytes(self) -> int:
        return self._weights + sum(each._cache.most_bytes for each in self._modules)

    def _reaches(self, number: int) -> bool:
        # The last module reads a state that each module before it made from one token earlier.
        known = self._cache.seq_lens[number] + self._count(number)
        return super()._reaches(number) and known > len(self.parts)

    def after_text(self, rows: RowsView, tree: Tree) -> Tensor:
        logits = super().after_text(rows, tree)
        self._tokens = rows.last_tokens[:, :0]
        return logits

    def after(self, rows: RowsView, tokens: Tensor, first: int) -> Tensor:
        self._tokens = torch.cat([self._tokens, tokens], 1)
        depth, modules = self._tree.depths[first], self._modules
        if depth < len(modules):
            return modules[depth].after_nodes(rows, modules[depth - 1], self._tokens, first)
        return modules[-1].after(rows, tokens, first)
