"""Files of substitutes: weights in fewer bits, as safetensors, bound to the weights they were made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from selfspec.errors import DraftConfigError
from selfspec.files.described_tensors import DescribedTensors, write_described
from selfspec.kernels.rounded import Precision, RoundedWeight
from selfspec.model.fingerprint import check_base

_ABOUT = "substitutes"
REWRITE = "write it again: selfspec quantize"
"""Remedy for a file that cannot be used."""


@dataclass(frozen=True)
class AboutSubstitutes:
    """Describes a file of substitutes, in the file itself.

    Attributes:
        base: fingerprint of the weights they were rounded from.
        group_size: number of weights that share a scale, in 4 bits.
        layers: numbers of the layers that have substitutes; None: all.
        head: whether the language-model head has one.
    """

    format: Literal[4]
    base: str
    bits: Literal[8, 4]
    group_size: int
    layers: tuple[int, ...] | None
    head: bool


class SubstituteFile(DescribedTensors[AboutSubstitutes]):
    """Reads a file that `write_substitutes` wrote, one weight at a time.

    Raises:
        DraftConfigError: it is missing, truncated, damaged, no such file or of another format.
    """

    def __init__(self, file: str | Path) -> None:
        super().__init__(file, "substitutes", _ABOUT, AboutSubstitutes, REWRITE)
        parts = ("levels", "scales", "factors") + (("zeros",) if self.about.bits == 4 else ())
        self.check_names(f"{weight}.{part}" for weight in self.weights for part in parts)

    @property
    def weights(self) -> set[str]:
        """Names of the parameters in the file."""
        return {name.rpartition(".")[0] for name in self.names}

    def check(self, precision: Precision, model: nn.Module) -> None:
        """Refuse a file of another precision, or of another model than this one with its present weights.

        Raises:
            DraftConfigError: naming what differs.
        """
        if (self.about.bits, self.about.group_size) != (precision.bits, precision.group_size):
            raise DraftConfigError(
                f"{self.source} holds {self.about.bits} bits in groups of {self.about.group_size} by now, and not "
                f"{precision.bits} in groups of {precision.group_size}; make the draft of it anew, or {REWRITE}"
            )
        check_base(model, self.about.base, self.source, DraftConfigError, REWRITE)

    def weight(self, name: str, shape: torch.Size, device: torch.device) -> RoundedWeight:
        """Read a parameter in fewer bits, of shape `[..., out, in]`, to a device.

        Raises:
            DraftConfigError: the file does not have it, or not as its `about` says.
        """
        rounded = RoundedWeight.empty(shape, Precision(self.about.bits, self.about.group_size), device)
        for part, values in rounded.parts.items():
            read = self.read_like(f"{name}.{part}", values)
            if read.is_floating_point() and not read.isfinite().all():
                raise DraftConfigError(f"{self.source} holds NaN or infinite values in {name}.{part}; {REWRITE}")
            values.copy_(read)
        return rounded


def write_substitutes(file: str | Path, about: AboutSubstitutes, weights: Iterable[tuple[str, RoundedWeight]]) -> None:
    """Write substitutes, by parameter name, and their description: the whole file or none of it.

    Raises:
        StorageError: it cannot be written.
    """
    tensors = {f"{name}.{part}": values for name, weight in weights for part, values in weight.parts.items()}
    write_described(Path(file), _ABOUT, asdict(about), tensors)
