"""Files of substitutes: weights in a format, as safetensors, bound to the weights they were made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import DraftConfigError
from selfspec.files.json_text import DescribedTensors, write_described
from selfspec.formats.format import Format, formats
from selfspec.formats.packed import Packed
from selfspec.model.early_head import plain_head
from selfspec.model.identity import check_base

_ABOUT = "substitutes"
REWRITE = "write it again: selfspec quantize"
"""Remedy for a file that cannot be used."""


@dataclass(frozen=True)
class AboutSubstitutes:
    """Describes a file of substitutes, in the file itself, beside the settings of their format."""

    format: Literal[5]
    base: str  # fingerprint of the weights they were packed from
    layers: tuple[int, ...] | None  # numbers of the layers that have substitutes; None: all
    head: bool
    weights: str  # name of their format


class SubstituteFile(DescribedTensors[AboutSubstitutes]):
    """Reads a file of `write_substitutes` weight by weight; raises `DraftConfigError` if it is missing or unfit."""

    def __init__(self, file: str | Path) -> None:
        super().__init__(file, "substitutes", _ABOUT, AboutSubstitutes, REWRITE)
        kind = formats().get(self.about.weights)
        if kind is None:
            raise DraftConfigError(
                f"{file} cannot be read as substitutes (weights: no format {self.about.weights!r} is known); {REWRITE}"
            )
        self.format = self.described_as(kind)
        self.check_names(f"{weight}.{part}" for weight in self.weights for part in self.format.parts)

    @property
    def weights(self) -> set[str]:
        """Names of the parameters in the file."""
        return {name.rpartition(".")[0] for name in self.names}

    def check(self, format: Format, model: nn.Module) -> None:
        """Refuse a file of another format, or of another model than this one with its present weights."""
        if self.format != format:
            raise DraftConfigError(
                f"{self.source} holds {self.format} by now, and not {format}; make the draft of it anew, or {REWRITE}"
            )
        check_base(model, self.about.base, self.source, DraftConfigError, REWRITE)

    def weight(self, name: str, shape: torch.Size, device: torch.device) -> Packed:
        """Read a packed parameter of shape `[..., out, in]` to a device."""
        packed = self.format.empty(shape, device)
        for part, values in packed.parts.items():
            read = self.read_like(f"{name}.{part}", values)
            if read.is_floating_point() and not read.isfinite().all():
                raise DraftConfigError(f"{self.source} holds NaN or infinite values in {name}.{part}; {REWRITE}")
            values.copy_(read)
        return packed


def write_substitutes(
    file: str | Path, about: AboutSubstitutes, format: Format, weights: Iterable[tuple[str, Packed]]
) -> None:
    """Write substitutes, by parameter name, and their description: the whole file or none of it."""
    tensors = {f"{name}.{part}": values for name, weight in weights for part, values in weight.parts.items()}
    write_described(Path(file), _ABOUT, {**asdict(about), **asdict(format)}, tensors)


Weights = list[tuple[str, Tensor]]
"""Weights with their parameters' names."""

# Bytes of moments at a time (more if one is larger); all texts are read again each time.
_BYTES_AT_ONCE = 1 << 30


def packed_weights(
    model: PreTrainedModel, weights: Weights, format: Format, texts: Sequence[Tensor] = ()
) -> Iterator[tuple[str, Packed]]:
    """Pack weights; with texts, so that errors compensate each other on the layers' inputs there.

    Texts are `[rows, tokens]`, unpadded. Experts, and weights whose layer no text reaches, are packed by themselves.
    """
    head = f"{plain_head(model)}.weight"
    for some in _at_once(weights) if texts else [weights]:
        moments = _input_moments(model, [name for name, weight in some if weight.ndim == 2], texts)
        for name, weight in some:
            if name in moments:
                yield name, format.pack_for(weight, moments.pop(name))
            else:
                yield name, (format.pack_head if name == head and not texts else format.pack)(weight)


def _at_once(weights: Weights) -> Iterator[Weights]:
    some: Weights = []
    taken = 0
    for name, weight in weights:
        taken += 4 * weight.shape[-1] ** 2
        if some and taken > _BYTES_AT_ONCE:
            yield some
            some, taken = [], 4 * weight.shape[-1] ** 2
        some.append((name, weight))
    yield some


@torch.no_grad()
def _input_moments(model: PreTrainedModel, weights: Iterable[str], texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Sum `x^T x` over the inputs `x` of layers as a model reads texts: `[in, in]` in float32, by weight."""
    moments: dict[str, Tensor] = {}

    def add(weight: str, _layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        states = given[0].flatten(0, -2).float()
        moments[weight] = torch.addmm(moments.get(weight, states.new_zeros(1)), states.t(), states)

    with ExitStack() as hooks:
        for weight in weights if texts else ():
            layer = model.get_submodule(weight.rpartition(".")[0])
            hooks.enter_context(layer.register_forward_pre_hook(partial(add, weight)))
        for text in texts:
            model(input_ids=text.to(model.device), use_cache=False)
    return moments
