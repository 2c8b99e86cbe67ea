"""Train Medusa heads (Cai et al., 2024, arXiv 2401.10774), in FasterDecoding's layout."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers import PreTrainedModel

from selfspec.model.identity import weight_of
from selfspec.tools.train.corpus import Split
from selfspec.tools.train.heads.lesson import DraftHeadModule, HeadLesson, Seen
from selfspec.tools.train.recipe import HeadRecipe


class MedusaModule(DraftHeadModule):
    """A residual block for each of `heads` next tokens, before the target's own language-model head, of `width`."""

    def __init__(self, output: nn.Module, heads: int, width: int) -> None:
        super().__init__()
        # In a tuple it is none of the weights that learn.
        self._output = (output,)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(heads))
        for weight in self.parameters():
            # At first each head says what the target says of the first of these tokens.
            nn.init.zeros_(weight)

    def forward(self, seen: Seen, steps: int) -> list[Tensor]:
        (output,), (states,) = self._output, seen.features
        found = []
        for step, block in enumerate(self.blocks[:steps]):
            # The last state that is known where the tokens of `step` pairs are drafted.
            known = pad(states, (0, 0, step, 0))[:, : states.shape[1]][seen.reached(step)]
            weight = output.get_parameter("weight")
            found.append(nn.functional.linear((known + silu(block(known))).to(weight.dtype), weight))
        return found

    def weights(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for number, block in enumerate(self.blocks):
            named |= {f"{number}.0.linear.{name}": weight for name, weight in block.named_parameters()}
            # Published heads have one each.
            named[f"{number}.1.weight"] = self._output[0].get_parameter("weight").clone()
        return named


class MedusaLesson(HeadLesson):
    """Trains Medusa heads: `depth` of them."""

    model: MedusaModule

    def __init__(self, base: PreTrainedModel, recipe: HeadRecipe, text: Split, seed: int) -> None:
        super().__init__(base, recipe, text, ("normed",))
        output = base.get_output_embeddings()
        self.model = MedusaModule(output, recipe.depth, weight_of(output).shape[1]).to(base.device)

    def config(self) -> dict[str, Any]:
        vocabulary, width = weight_of(self._base.get_output_embeddings()).shape
        return {
            "model_type": "medusa",
            "medusa_num_heads": self._recipe.depth,
            "medusa_num_layers": 1,
            "base_model_name_or_path": self._base.name_or_path,
            "hidden_size": width,
            "vocab_size": vocabulary,
        }
