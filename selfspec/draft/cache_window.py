"""Drafting over a window of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.cache.masks import Window
from selfspec.draft.along_layer_path import AroundLayerPath, LayerPathDrafter
from selfspec.draft.drafter import Drafter, drafter, read_number
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath

LONG = 1024
"""Tokens of a text from which on it may pay to read less than the whole cache."""

SINKS = 4
"""Number of first tokens that stay visible, as in StreamingLLM."""
# More tokens than any text has.
_MOST = 10**9 - 1


@drafter(
    "window",
    argument=":N",
    written="behind",
    example="int8+window:512",
    help="any of these whose steps attend to the latest N tokens and the first 4, for long texts",
)
@dataclass(frozen=True, eq=False)
class CacheWindow(AroundLayerPath):
    """Runs another path drafter, whose draft steps attend to the `recent` latest tokens and the first few, the sinks.

    It bounds the bytes read at long contexts; the target attends to all tokens. As in StreamingLLM (Xiao et al., 2024,
    arXiv 2309.17453; sinks) and MagicDec (Sadhukhan et al., 2024, arXiv 2408.11049; drafts).
    """

    recent: int = 512
    sinks: int = SINKS

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, least in (("recent", self.recent, 1), ("sinks", self.sinks, 0)):
            if type(value) is not int or not least <= value <= _MOST:
                raise DraftConfigError(
                    f"a window's {name} is an integer from {least} to {_MOST}, got {shown(value)}; e.g. int8+window:512"
                )

    @property
    def spelling(self) -> str | None:
        before = self.draft_with.spelling
        return None if self.sinks != SINKS or before is None else f"{before}+window:{self.recent}"

    @classmethod
    def spelled_behind(cls, before: Drafter, name: str, argument: str | None) -> CacheWindow:
        if not isinstance(before, LayerPathDrafter):
            raise ValueError(argument)
        return cls(before, read_number(argument))

    @classmethod
    def variants_behind(cls, before: Drafter, context: int) -> Sequence[Drafter]:
        return [cls(before)] if isinstance(before, LayerPathDrafter) and context >= LONG else ()

    def path(self, depth: int) -> LayerPath:
        path = self.draft_with.path(depth)
        if path.window is not None:
            raise DraftConfigError("a draft attends to one window of the cache; write +window once")
        return replace(path, window=Window(self.recent, self.sinks))

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        if adapter.ragged != "mask":
            raise DraftConfigError(
                f"{type(model).__name__} makes its masks itself, so that a draft cannot read less of its cache; draft "
                f"with {self.draft_with.spelling or 'the same drafter'} alone"
            )
