"""Train modules for multi-token prediction further, applied several times, as drafts apply them (FastMTP)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from selfspec.draft.heads.mtp import MultiTokenPrediction
from selfspec.errors import TrainingError
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import Split
from selfspec.tools.train.heads.lesson import HeadLesson, UnrolledModule
from selfspec.tools.train.recipe import HeadRecipe


class MtpModule(UnrolledModule):
    """The module for multi-token prediction in the base's checkpoint."""

    def __init__(self, base: PreTrainedModel) -> None:
        drafter = MultiTokenPrediction()
        head, *others = drafter.heads(base)
        if others:
            raise TrainingError(
                f"this checkpoint has {1 + len(others)} modules, of which each reads what those before it make; one "
                "that learns by itself would spoil the others, and they are not trained together yet; train --kind "
                "eagle3"
            )
        output = base.get_output_embeddings()

        def logits(normed: Tensor) -> Tensor:
            return linear(normed.to(output.weight.dtype), output.weight, output.bias)

        # Its embeddings and head are the model's, which stay as they are.
        head.layers.set_input_embeddings(nn.Identity())
        head.layers.set_output_embeddings(nn.Identity())
        super().__init__(head.fusion, head.layers, logits, head.recycled)
        self.float().requires_grad_(True)
        self._published = drafter.names(base)
        lacks = self._published.values() - self._parts().keys()
        if lacks:
            raise TrainingError(
                f"the module keeps the weight {min(lacks)} in another form than its checkpoint, as those with experts "
                "do, and cannot be trained yet; train --kind eagle3"
            )

    def _parts(self) -> Mapping[str, Tensor]:
        inside = self.layers.get_submodule(find_adapter(self.layers).base(self.layers))
        named = dict(self.fusion.named_parameters())
        return named | {name.replace("layers.0.", "block.", 1): weight for name, weight in inside.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        parts = self._parts()
        return {name: parts[part] for name, part in self._published.items()}


class MtpLesson(HeadLesson):
    """Trains the module that the base's checkpoint has for drafts of `depth` tokens."""

    model: MtpModule

    def __init__(self, base: PreTrainedModel, recipe: HeadRecipe, text: Split, seed: int) -> None:
        super().__init__(base, recipe, text, ("normed",))
        self.model = MtpModule(base).to(base.device)

    @classmethod
    def check(cls, base: PreTrainedModel) -> None:
        MultiTokenPrediction().check_model(base, find_adapter(base))
        MtpModule(base)

    def config(self) -> dict[str, Any]:
        return copy.deepcopy(self._base.config.to_dict())
