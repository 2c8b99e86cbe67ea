"""Read folders of published heads: their configuration and weights. Only tensors are unpickled."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from selfspec.arguments import checked_path
from selfspec.draft.drafter import Drafter, OwnBytes, name_of
from selfspec.draft.heads.head import Fusion, Head, inside_of, weight_bytes
from selfspec.errors import CheckpointError, HeadError
from selfspec.files.json_text import read_object
from selfspec.formats.format import Format
from selfspec.model.checkpoint import weight_files
from selfspec.model.gated_view import Point
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.registry import find_adapter
from selfspec.model.substitutes import Substitutes

_CONFIG = "config.json"
_KINDS = ("eagle", "dflash", "medusa", "hydra", "queries")
_FIELDS = {
    "backbone_hidden_size": "queries",
    "dflash_config": "dflash",
    "medusa_num_heads": "medusa",
    "hydra_num_heads": "hydra",
}
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class FromFolder(Drafter):
    """Drafts with weights from a folder, and is written `name:FOLDER`."""

    runs = "model"
    source: str
    weight_format: Format | None = None
    _shapes: Mapping[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _config: Any = field(init=False, repr=False, compare=False)
    holds: ClassVar[str]  # the kind of head, for messages
    essential: ClassVar[tuple[str, ...]] = ()  # names of weights without which a folder holds no such head

    def __post_init__(self) -> None:
        folder = HeadFolder.at(self.source)
        found = kind_of(folder.config())
        if found not in (None, name_of(type(self))):
            remedy = f"write {found}:{self.source}" if found in _KINDS else f"heads of the kind {found!r} are not read"
            raise HeadError(f"{self.source} holds a head of another kind than {name_of(type(self))!r}; {remedy}")
        shapes = {self.common_name(name): shape for name, shape in folder.shapes().items()}
        try:
            config = self.read_config(folder.config())
        except ValueError as error:
            raise HeadError(f"{self.source} holds no {self.holds} ({error}); see docs/heads.md") from error
        lacks = [name for name in self.essential if name not in shapes]
        if lacks:
            raise HeadError(f"{self.source} holds no {self.holds}: it has no weight {lacks[0]}; see docs/heads.md")
        lost = [name for name in self.needed(shapes) if name not in shapes]
        if lost:
            raise HeadError(f"{self.source} lacks the weight {lost[0]}; copy it from the original again")
        object.__setattr__(self, "_shapes", shapes)
        object.__setattr__(self, "_config", config)

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> Any:
        """Read what the drafter needs from the config.json; a `ValueError` says what is missing."""
        return config

    @staticmethod
    def common_name(name: str) -> str:
        """Return the name of a weight without what differs between layouts."""
        return name

    @staticmethod
    def needed(shapes: Mapping[str, tuple[int, ...]]) -> Sequence[str]:
        """Return the names of weights that a head with these others needs."""
        return ()

    def foreign(self, said: str) -> HeadError:
        """Return the error for a model that the head was not trained for."""
        return HeadError(f"{self.source} was trained for another model: {said}")

    def weights(self) -> dict[str, Tensor]:
        """Read the weights by their common names."""
        return {self.common_name(name): weight for name, weight in HeadFolder.at(self.source).tensors().items()}

    def features(self, depth: int) -> tuple[Point, ...]:
        return ("normed",)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        return OwnBytes(weight_bytes(self._shapes, model, self.weight_format))

    @property
    def spelling(self) -> str:
        return f"{format_spelled(self.weight_format)}{name_of(type(self))}:{self.source}"

    def in_format(self, format: Format) -> Drafter | None:
        return replace(self, weight_format=format)


@dataclass(frozen=True)
class HeadFolder:
    """Reads the folder `path` of a head; its methods raise `HeadError` for files that are missing or damaged."""

    path: Path

    @classmethod
    def at(cls, folder: str | Path) -> HeadFolder:
        """Return the folder of a given path; raise `HeadError` if there is none."""
        path = checked_path("folder", folder, HeadError).expanduser()
        if not path.is_dir():
            raise HeadError(f"there is no folder {str(folder)!r}; download the head and give its folder")
        return cls(path)

    def config(self) -> dict[str, Any]:
        """Read its config.json."""
        return read_object(self.path / _CONFIG, HeadError)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Read the names and shapes of its weights; for safetensors, only the headers are read."""
        files = self._safetensors()
        if files is None:
            return {name: tuple(weight.shape) for name, weight in self.tensors().items()}
        found: dict[str, tuple[int, ...]] = {}
        for file in files:
            with self._opened(file) as weights:
                found |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        return found

    def tensors(self, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Read its weights, or only those in `names`; files with NaN, or with more than tensors, raise `HeadError`."""
        files = self._safetensors()
        found: dict[str, Tensor] = {}
        if files is None:
            file = next(file for pattern in _PICKLES for file in sorted(self.path.glob(pattern)))
            try:
                content = torch.load(file, map_location="cpu", weights_only=True)
            except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
                said = " ".join(str(error).split())[:200]
                raise HeadError(
                    f"{file} is damaged, or holds more than tensors and would run code ({said}); convert it to "
                    "safetensors where you trust it"
                ) from error
            if not isinstance(content, Mapping) or not all(isinstance(each, Tensor) for each in content.values()):
                raise HeadError(f"{file} holds no table of tensors; copy it from the original again")
            found = {str(name): weight for name, weight in content.items()}
        for file in files or ():
            with self._opened(file) as weights:
                wanted = [name for name in weights.keys() if names is None or name in names]  # noqa: SIM118
                found |= {name: weights.get_tensor(name) for name in wanted}
        wrong = [
            name
            for name, each in found.items()
            if each.element_size() > 1 and each.is_floating_point() and not each.isfinite().all()
        ]
        if wrong:
            raise HeadError(f"the weight {wrong[0]} in {self.path} is NaN or infinite; copy the head again")
        return found

    def _safetensors(self) -> list[Path] | None:
        """Return the safetensors files; None if there is a pickle in their place."""
        if not any(self.path.glob("*.safetensors*")) and any(any(self.path.glob(each)) for each in _PICKLES):
            return None
        try:
            files = weight_files(self.path, PreTrainedConfig())
        except CheckpointError as error:
            raise HeadError(str(error)) from error
        # Modules for multi-token prediction may have a file that the index does not name.
        return [*files, *(file for file in sorted(self.path.glob("*mtp*.safetensors")) if file not in files)]

    def _opened(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise HeadError(f"{file} is truncated or corrupt ({error}); copy or download it again") from error


def format_spelled(format: Format | None) -> str:
    """Return the prefix that a weight format has in a head's spelling."""
    return "" if format is None else f"{format.name}+"


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of the drafter for a head with this config.json; None: the file does not say."""
    named = str(config.get("speculators_model_type") or "")
    if named:
        return "eagle" if named == "eagle3" else named
    for named_by, kind in _FIELDS.items():
        if named_by in config:
            return kind
    names = " ".join(map(str, config.get("architectures") or ()))
    if "PEagle" in names or config.get("parallel_drafting"):
        return "peagle"
    return "eagle" if "Eagle" in names or "eagle_config" in config else None


def drafted_tokens(differences: Tensor | None, drafted: Tensor | None, vocabulary: int, source: str) -> Tensor | None:
    """Return the ids of the target that a head drafts, by its `d2t` and `t2d`; None: all. Raises `HeadError`."""
    if differences is None:
        return None
    tokens = torch.arange(len(differences)) + differences.cpu().long()
    low, high = tokens.aminmax()
    if len(tokens.unique()) < len(tokens) or low < 0 or high >= vocabulary:
        raise HeadError(f"d2t of {source} maps two tokens to one, or a token to none of this model")
    if drafted is not None and not torch.equal(tokens.sort().values, drafted.cpu().nonzero()[:, 0]):
        raise HeadError(f"d2t and t2d of {source} name different tokens; copy the head from the original again")
    return tokens


def assembled(
    model: PreTrainedModel,
    layers: PreTrainedModel,
    fusion: Fusion,
    weights: Mapping[str, Tensor],
    source: str,
    recycled: Literal["last", "normed"],
) -> Head:
    """Fill layers and fusion of a head, and give it its embeddings, output layer and tokens, or else the model's."""
    embed = model.get_input_embeddings()
    given, own = weights.get("embed_tokens.weight"), weight_of(embed)
    if given is not None and (
        given.shape != own.shape or own.is_meta or not torch.equal(given.to(own.dtype), own.detach().cpu())
    ):
        embed = nn.Embedding.from_pretrained(given.to(model.device, model.dtype))
    for module in (fusion, inside_of(layers)):
        fill(module, weights, source)
        module.to(device=model.device, dtype=model.dtype)
    layers.set_output_embeddings(output_layer(weights, "lm_head.", model, source))
    layers.set_input_embeddings(embed)
    tokens = drafted_tokens(weights.get("d2t"), weights.get("t2d"), vocabulary_size(model), source)
    tokens = None if tokens is None else tokens.to(model.device)
    return Head(fusion, layers, find_adapter(layers), recycled, embed, tokens)


def fill(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Put weights into a module on the meta device; raise `HeadError` for one that is missing or does not fit."""
    wanted = dict(module.named_parameters())
    for name, parameter in wanted.items():
        if name not in weights:
            raise HeadError(f"{source} lacks the weight {name}; its config.json belongs to other weights")
        if weights[name].shape != parameter.shape:
            raise HeadError(
                f"the weight {name} of {source} is {list(weights[name].shape)}, and its config.json says "
                f"{list(parameter.shape)}"
            )
    module.load_state_dict({name: weights[name] for name in wanted}, strict=False, assign=True)
    module.requires_grad_(False).eval()


def output_layer(weights: Mapping[str, Tensor], prefix: str, model: PreTrainedModel, source: str) -> nn.Module:
    """Return the head's own output layer, whose names begin with `prefix`; the model's if there is none."""
    own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    if not own:
        output: nn.Module = model.get_output_embeddings()
        return output
    tokens, width = own["weight"].shape
    layer = nn.Linear(width, tokens, bias="bias" in own, device="meta")
    fill(layer, own, source)
    return layer.to(device=model.device, dtype=model.dtype)


def linear_layers(weights: Mapping[str, Tensor], format: Format | None = None) -> nn.Module:
    """Make linear layers, of a format, by weights `NAME.weight` and, if there is one, `NAME.bias`; dots become /."""
    layers = nn.ModuleDict()
    for name, weight in weights.items():
        path, _, last = name.rpartition(".")
        if last == "weight":
            bias = weights.get(f"{path}.bias")
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
            layer.load_state_dict({"weight": weight, **({} if bias is None else {"bias": bias})}, assign=True)
            layers[path.replace(".", "/")] = layer.requires_grad_(False)
    return layers if format is None else Substitutes().within(layers, "", format)


SCALE = "_scale_inv"
"""Suffix that turns the name of a weight into the name of its scales."""

_FLOAT8 = torch.float8_e4m3fn
_USUAL = (128, 128)
# Suffixes for the parts of a weight in layouts that are not read.
_OTHERS = (
    *(".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_shape", ".weight_zero_point"),
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".absmax", ".quant_map", "_blocks", "_scales"),
)


def check_layout(names: Collection[str], config: Mapping[str, Any], source: str) -> None:
    """Refuse weights in few bits, unless they are in blocks of float8."""
    other = next((name for name in names if name.endswith(_OTHERS)), None)
    if other is not None:
        raise _refused(config, other, source)


def dequantised(weights: Mapping[str, Tensor], config: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    """Multiply weights in float8 by the scales of their blocks, in float32; return other weights unchanged.

    Weights are `[..., out, in]`, scales `[..., blocks of out, blocks of in]`; the last blocks may be cut off.
    """
    found = {name: weight for name, weight in weights.items() if not name.endswith(SCALE)}
    block = tuple(_quantisation(config).get("weight_block_size") or _USUAL)
    for name, weight in found.items():
        if weight.is_floating_point() and weight.element_size() > 1:
            continue
        scales = weights.get(f"{name}{SCALE}")
        if weight.dtype != _FLOAT8 or scales is None:
            raise _refused(config, f"{name} in {weight.dtype}", source)
        wanted = (*weight.shape[:-2], *(-(-size // of) for size, of in zip(weight.shape[-2:], block, strict=True)))
        if scales.shape != wanted:
            raise HeadError(
                f"the scales of {name} in {source} are {list(scales.shape)}, and blocks of {list(block)} need "
                f"{list(wanted)}; copy config.json and the weights again"
            )
        spread = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        found[name] = weight.float() * spread[..., : weight.shape[-2], : weight.shape[-1]]
        if not found[name].isfinite().all():
            raise HeadError(f"the weight {name} in {source} is NaN or infinite; copy the checkpoint again")
    return found


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inside = config.get("text_config")
    places = (config, inside if isinstance(inside, dict) else {})
    found = (place.get("quantization_config") for place in places)
    return next((each for each in found if isinstance(each, dict)), {})


def _refused(config: Mapping[str, Any], what: str, source: str) -> HeadError:
    method = _quantisation(config).get("quant_method") or "an unknown layout"
    return HeadError(
        f"the weights in {source} are kept in few bits as {method} does ({what}), which is not read here; take a "
        "checkpoint in bfloat16, or in float8 with scales of blocks (weight_scale_inv)"
    )
