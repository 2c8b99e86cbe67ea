"""Drafting with fewer experts: a draft step sends each token to the likeliest few of the model's choice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.along_layer_path import AroundLayerPath, LayerPathDrafter
from selfspec.draft.declaration import drafter, read_number
from selfspec.draft.drafter import Drafter
from selfspec.errors import DraftConfigError
from selfspec.model.experts import experts_of
from selfspec.model.layer_path import LayerPath
from selfspec.values import shown


class _WholeNetwork(LayerPathDrafter):
    """Runs all layers unchanged, as the base of a drafter that changes something else."""

    def path(self, depth: int) -> LayerPath:
        return LayerPath.full(depth)


@drafter(
    "experts",
    argument=":N",
    example="experts:1",
    help="tokens of a mixture are sent to N experts; experts:1+int8 runs them in 8 bits",
)
@dataclass(frozen=True, eq=False)
class FewerExperts(AroundLayerPath):
    """Runs all layers, or another path drafter, with at most `most` routed experts for each token, the likeliest.

    Shared experts always run. The model weights the chosen experts as if it had been made with so few.
    """

    draft_with: LayerPathDrafter = field(default_factory=_WholeNetwork)
    most: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.most) is not int or self.most < 1:
            raise DraftConfigError(
                f"a token is sent to an integer number of experts, at least 1; got {shown(self.most)}"
            )

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> FewerExperts:
        return cls(most=read_number(argument))

    @property
    def spelling(self) -> str | None:
        if isinstance(self.draft_with, _WholeNetwork):
            return f"experts:{self.most}"
        before = self.draft_with.spelling
        return None if before is None else f"experts:{self.most}+{before}"

    @property
    def runs_exact_layers(self) -> bool:
        return False

    def followed_by(self, behind: Drafter) -> Drafter | None:
        is_whole = isinstance(self.draft_with, _WholeNetwork)
        return replace(self, draft_with=behind) if is_whole and isinstance(behind, LayerPathDrafter) else None

    def path(self, depth: int) -> LayerPath:
        path = self.draft_with.path(depth)
        if path.experts is not None:
            raise DraftConfigError("a draft has one number of experts; write experts:N once")
        return replace(path, experts=self.most)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        active = max((each.active for each in experts_of(model, adapter)), default=0)
        if active <= self.most:
            said = (
                f"sends each token to {active} experts; take fewer, or another draft"
                if active
                else "has no routed experts that a draft can leave out; take another draft"
            )
            raise DraftConfigError(f"experts:{self.most}: {type(model).__name__} {said}")
