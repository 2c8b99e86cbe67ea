"""Drafting with the model's own weights in fewer bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.arguments import shown
from selfspec.draft.along_layer_path import LayerPathDrafter
from selfspec.draft.drafter import Drafter, drafter
from selfspec.draft.early_exit import EarlyExit
from selfspec.draft.layer_skip import LayerSkip, layer_numbers
from selfspec.errors import DraftConfigError
from selfspec.formats.format import Format, copies, formats
from selfspec.model.layer_path import LayerPath, sublayers
from selfspec.model.substitutes import no_substitutes, substituted_weights

# Prior acceptance rates of siblings by rank.
_CHANCES = (0.95, 0.03, 0.01)


def _by_formats(kind: type[LowPrecision]) -> type[LowPrecision]:
    for each in reversed([each for each in formats().values() if not each.exact]):
        kind = drafter(each.name, help=each.help)(kind)
    return kind


@_by_formats
@dataclass(frozen=True, init=False)
class LowPrecision(LayerPathDrafter):
    """Drafts with low-precision weights over the shared cache, as in QuantSpec (Tiwari et al., 2025).

    Linear layers and experts have substitutes, rounded once and read by weight-only kernels; other modules run exactly.
    Verification resumes at the first layer left out or with substitutes, or starts from tokens if no layer is exact.
    Keys and values of the draft are overwritten.

    Attributes:
        format: format of the weights, or `bits`, 8 (a scale for each output) or 4 (one for each 32 weights).
        layers: numbers of the layers with substitutes; None: all.
        fewer: the exit or the skip set of the draft; None: all layers run.
        head_too: True if the language-model head is in fewer bits too.
    """

    format: Format
    layers: tuple[int, ...] | None
    fewer: EarlyExit | LayerSkip | None
    head_too: bool

    def __init__(
        self,
        bits: int = 8,
        layers: Iterable[int] | None = None,
        fewer: EarlyExit | LayerSkip | None = None,
        head: bool = True,
        *,
        format: Format | None = None,
    ) -> None:
        if format is None and (type(bits) is not int or bits not in (4, 8)):
            raise DraftConfigError(f"bits={bits!r}: there are kernels for 8 and 4 bits")
        values = {
            "format": format or formats()[f"int{bits}"](),
            "layers": None if layers is None else layer_numbers("layers", layers),
            "fewer": fewer,
            "head_too": head,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if type(head) is not bool:
            raise DraftConfigError(f"head={head!r}: write True to have the head in fewer bits too, or False")
        if not isinstance(fewer, EarlyExit | LayerSkip | None):
            raise DraftConfigError(f"fewer={shown(fewer)}: give an EarlyExit or a LayerSkip, e.g. EarlyExit(4)")
        if self.layers == ():
            raise DraftConfigError("layers is empty; name at least one layer, or leave the argument out for all layers")

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> LowPrecision:
        if argument is not None:
            raise ValueError(argument)
        return cls(format=formats()[name]())

    @property
    def spelling(self) -> str | None:
        kind = type(self.format)
        if formats().get(self.format.name) is not kind or self != LowPrecision(fewer=self.fewer, format=kind()):
            return None
        return self.format.name + ("" if self.fewer is None else f"+{self.fewer.spelling}")

    def followed_by(self, behind: Drafter) -> Drafter | None:
        if self == LowPrecision(format=self.format) and (packed := behind.in_format(self.format)) is not None:
            return packed
        if self.fewer is not None or not isinstance(behind, EarlyExit | LayerSkip):
            return None
        return LowPrecision(layers=self.layers, fewer=behind, head=self.head_too, format=self.format)

    @classmethod
    def variants(cls, depth: int) -> Sequence[Drafter]:
        whole = [cls(format=kind()) for kind in copies().values()]
        return [*whole, *(cls(fewer=EarlyExit(layer)) for layer in range(1, depth))]

    @property
    def chances(self) -> Sequence[float]:
        # Without an exit 8 bits agree with the target in 0.98 to 0.99 of all places, 4 bits in 0.94 mostly.
        return super().chances if self.fewer is not None else _CHANCES

    def path(self, depth: int) -> LayerPath:
        layers = range(depth) if self.layers is None else self.layers
        wrong = [layer for layer in layers if not 0 <= layer < depth]
        if wrong:
            raise DraftConfigError(f"layers={wrong}: out of range; this model has layers 0..{depth - 1}")
        path = LayerPath.full(depth) if self.fewer is None else self.fewer.path(depth)
        substituted = [each for each in sublayers(depth) if each.layer in layers and path.runs(each)]
        if not substituted:
            left = "the draft" if self.fewer is None else self.fewer.spelling
            raise DraftConfigError(f"layers={list(layers)}: {left} leaves none of them to run")
        return replace(path, format=self.format, substituted=frozenset(substituted), head_substituted=self.head_too)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        if not self.format.runs_on(model.device.type):
            raise DraftConfigError(
                f"there are no kernels for low-precision drafts on {model.device.type}; use cpu or cuda"
            )
        if self.fewer is not None:
            self.fewer.check_model(model, adapter)
        layers = adapter.decoder_layers(model)
        path = self.path(len(layers))
        modules = [
            layers[sublayer.layer].get_submodule(name)
            for sublayer in path.substituted
            for name in adapter.modules_of(layers[sublayer.layer], sublayer.part)
        ]
        head = [model.get_output_embeddings()] if self.head_too else []
        if any(weight.is_meta for module in [*modules, *head] for weight in module.parameters()):
            raise DraftConfigError(
                f"weights of {type(model).__name__} are offloaded, so they have no copies in fewer bits, and each "
                'draft step would fetch them; load it with selfspec.load(path, memory="6GiB"), which makes copies, or '
                "draft with PromptLookup()"
            )
        if any(True for module in modules for _ in substituted_weights(module, self.format)):
            return
        # Weights of a quantised file may still be computed in floating point.
        if getattr(model.config, "quantization_config", None) is not None:
            raise DraftConfigError(
                f"{type(model).__name__} is quantised already, and copies in fewer bits are of dense weights; draft "
                "with PromptLookup() or an exit, or load the checkpoint that it was quantised from"
            )
        raise no_substitutes(model, self.format)
