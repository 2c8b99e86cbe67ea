"""Low-rank additions to linear layers (LoRA) that only the last tokens of a pass use.

Outputs of earlier tokens stay as they are: additions are computed and added for the last tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from selfspec.errors import UnsupportedModelError
from selfspec.model.view import replaced, view_with_parts

_Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Lora:
    """Holds low-rank additions to linear layers of one model.

    Attributes:
        down: by layer name in the model, the projection of its input, `[..., in]` to `[..., rank]`.
        up: by layer name, the projection to what is added to its output, `[..., rank]` to `[..., out]`, scaled.
    """

    down: Mapping[str, nn.Module]
    up: Mapping[str, nn.Module]

    def within(self, layers: Sequence[nn.Module], prefix: str, first: int) -> list[nn.Module]:
        """Return views of decoder layers whose linear layers have the additions.

        Args:
            layers: all decoder layers of the model.
            prefix: their name in the model.
            first: first token of a pass that gets additions.
        """
        changed = list(layers)
        for number, layer in enumerate(layers):
            start = f"{prefix}.{number}."
            own = {name.removeprefix(start): name for name in self.down if name.startswith(start)}
            parts = {}
            for place, name in own.items():
                linear = layer.get_submodule(place)
                parts[place] = replaced(linear, partial(_added, first, linear, self.down[name], self.up[name]))
            if parts:
                changed[number] = view_with_parts(layer, parts)
        return changed


@dataclass(frozen=True)
class LoraRows:
    """Says which tokens of a pass use additions.

    Attributes:
        lora: the additions.
        first: place in the pass of the first token that uses them; all later tokens do, too.
    """

    lora: Lora
    first: int


def _added(first: int, linear: _Layer, down: _Layer, up: _Layer, states: Tensor) -> Tensor:
    # In flattened states, places in the pass are not known.
    if states.dim() != 3:
        raise UnsupportedModelError(
            f"a layer of this model is given states of {states.dim()} dimensions, in which the tokens that use a LoRA "
            "cannot be told from the others; draft with something else, or leave that layer out of the LoRA"
        )
    given = linear(states)
    return torch.cat([given[:, :first], given[:, first:] + up(down(states[:, first:]))], 1)
