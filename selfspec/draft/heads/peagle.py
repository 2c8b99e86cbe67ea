"""P-EAGLE: an EAGLE-3 head that guesses all tokens of a draft in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.drafter import drafter
from selfspec.draft.heads.eagle import Eagle
from selfspec.draft.heads.folder import HeadFolder
from selfspec.draft.heads.growing_head import LevelProposer
from selfspec.draft.heads.head import Fusion
from selfspec.draft.heads.pairs import PairState
from selfspec.errors import HeadError
from selfspec.model.identity import weight_of

# Draft tokens of published heads, where the config.json does not say.
_USUAL = 8


@drafter(
    "peagle",
    argument=":FOLDER",
    help="a published P-EAGLE head that was trained for this model",
)
@dataclass(frozen=True)
class ParallelEagle(Eagle):
    """Drafts with a P-EAGLE head (2026, arXiv 2602.01469).

    Behind the last committed token it reads slots for the tokens to come. All slots have the embedding of a mask token
    and a learnt state, so that one pass guesses every level, and no level depends on the tokens drafted before it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if "mask_hidden" not in self._shapes or not self._is_third:
            raise HeadError(f"{self.source} holds no P-EAGLE head: it has no weight mask_hidden; see docs/heads.md")

    @property
    def _mask_token(self) -> int:
        config = HeadFolder.at(self.source).config()
        found = next((config[name] for name in ("mask_token_id", "ptd_token_id") if config.get(name) is not None), None)
        if type(found) is not int or found < 0:
            raise HeadError(f"the config.json of {self.source} names no mask_token_id; copy it from the original again")
        return found

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        own = self._shapes.get("embed_tokens.weight", (weight_of(model.get_input_embeddings()).shape[0],))[0]
        if self._mask_token >= own:
            raise HeadError(
                f"{self.source} masks with token {self._mask_token}, and this model knows {own}: it is for another one"
            )

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        # One pass drafts all tokens.
        return super().cost(model, adapter) / _USUAL

    def proposer(self, state: PairState) -> LevelProposer:
        return LevelProposer(state)

    def _masked(self, fusion: Fusion, embed: nn.Module, weights: Mapping[str, Tensor]) -> Tensor:
        table = weight_of(embed)
        assert isinstance(table, Tensor)
        count = len(self._config.points) or 3
        parts = weights["mask_hidden"].flatten().to(table.device, table.dtype).chunk(count)
        token = torch.tensor(self._mask_token, device=table.device)
        return fusion.inputs(embed(token), fusion.state(parts))
