"""Drafting over less of the cache: a window, or the keys with most of the target's attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.cache.masks import all_layers_slide
from selfspec.cache.view import CHUNK, WHOLE, CacheView, Window
from selfspec.draft.along_layer_path import AroundLayerPath, LayerPathDrafter
from selfspec.draft.drafter import Drafter, drafter, read_number
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import has_encoder
from selfspec.runtime.attention import AttentionShares

LONG = 1024
"""Tokens of a text from which on it may pay to read less than the whole cache."""


@dataclass(frozen=True, eq=False)
class OverLessOfCache(AroundLayerPath):
    """Runs another path drafter, whose steps read less than the whole cache."""

    @property
    @abstractmethod
    def view(self) -> CacheView:
        """The part of the cache that draft steps attend to."""

    @classmethod
    def spelled_behind(cls, before: Drafter, name: str, argument: str | None) -> OverLessOfCache:
        if not isinstance(before, LayerPathDrafter):
            raise ValueError(argument)
        made: Callable[[LayerPathDrafter, int], OverLessOfCache] = cls
        return made(before, read_number(argument))

    @classmethod
    def variants_behind(cls, before: Drafter, context: int) -> Sequence[Drafter]:
        return [cls(before)] if isinstance(before, LayerPathDrafter) and context >= LONG else ()

    def path(self, depth: int) -> LayerPath:
        path = self.draft_with.path(depth)
        if path.view != WHOLE:
            raise DraftConfigError("a draft attends to one part of the cache; write one of +window and +top, once")
        return replace(path, view=self.view)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        if adapter.ragged != "mask":
            raise DraftConfigError(
                f"{type(model).__name__} makes its masks itself, so that a draft cannot read less of its cache; draft "
                f"with {self.draft_with.spelling or 'the same drafter'} alone"
            )


LEAST = 4 * CHUNK
"""The fewest keys that a draft may attend to."""


@drafter(
    "top",
    argument=":N",
    written="behind",
    example="int8+top:512",
    help="any of these whose steps attend to the N tokens that the target attends to most, for long texts",
)
@dataclass(frozen=True, eq=False)
class TopOfCache(OverLessOfCache):
    """Runs another path drafter, whose draft steps attend to `keys` tokens; a quarter of them are the latest.

    The rest are passages with most of the target's attention over layers and heads, measured in a plain step every 64
    tokens. Layers with a sliding window keep it. As in SpecExtend (Cha et al., 2025, arXiv 2505.20776) and SparseSpec
    (2025, arXiv 2512.01278).
    """

    keys: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.keys) is not int or self.keys < LEAST:
            raise DraftConfigError(
                f"a draft attends to at least {LEAST} keys, got {shown(self.keys)}; e.g. int8+top:512"
            )

    @property
    def spelling(self) -> str | None:
        before = self.draft_with.spelling
        return None if before is None else f"{before}+top:{self.keys}"

    @property
    def view(self) -> CacheView:
        return CacheView(top_keys=self.keys)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        alone = f"draft with {self.draft_with.spelling or 'the same drafter'} alone"
        if has_encoder(model) or not AttentionShares(model).sees_any:
            raise DraftConfigError(f"what {type(model).__name__} attends to cannot be seen; {alone}")
        if all_layers_slide(model.config.get_text_config(decoder=True)):
            raise DraftConfigError(f"every layer of {type(model).__name__} attends to a window already; {alone}")


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
class CacheWindow(OverLessOfCache):
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

    @property
    def view(self) -> CacheView:
        return CacheView(window=Window(self.recent, self.sinks))
