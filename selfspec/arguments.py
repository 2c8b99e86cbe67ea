"""Check arguments before they are used, and refuse wrong ones by name.

Commands use this too, so torch and transformers are imported only where they are needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING

from selfspec.errors import SelfSpecError, UnsupportedModelError, UnsupportedOptionError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def shown(value: object) -> str:
    """Return a value as a message shows it: as Python writes it, shortened where it is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"<integer of {value.bit_length()} bits>"
    writer = Repr()
    writer.maxstring = writer.maxother = 200
    return writer.repr(value)


def checked_path(name: str, value: object, error: type[SelfSpecError] = UnsupportedOptionError) -> Path:
    """Return an argument as a path; refuse what is neither a string nor a path."""
    if not isinstance(value, str | Path):
        raise error(f"{name} must be a path, as a string or a pathlib.Path; got {shown(value)}")
    return Path(value)


def is_whole(value: object) -> bool:
    """Return whether a value is an integer, but not a bool."""
    return type(value) is int


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


_CLASS = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)(?::(.+))?", re.DOTALL)


@dataclass(frozen=True)
class ClassPath:
    """Names a class of any package: `module:Class`, or `module:Class:argument`."""

    module: str
    name: str
    argument: str | None

    @classmethod
    def read(cls, text: str) -> ClassPath | None:
        """Read a name; return None if it has another form."""
        found = _CLASS.fullmatch(text)
        return None if found is None else cls(*found.groups())

    def load(self) -> object:
        """Import the class. ModuleNotFoundError, AttributeError: there is no such module, or it has no such class."""
        return getattr(import_module(self.module), self.name)


def check_kind(name: str, value: object, kind: type, remedy: str) -> None:
    """Refuse an argument that is given and is not an object of a class."""
    # A class itself may have all methods of a protocol.
    if value is not None and (isinstance(value, type) or not isinstance(value, kind)):
        raise UnsupportedOptionError(f"{name} must be an object of {kind.__name__}, got {shown(value)}; {remedy}")


def check_module(model: object) -> None:
    """Refuse a model that is not a torch module."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"a model is a torch module, as from_pretrained loads it; got {shown(model)}")


def check_methods(name: str, value: object, methods: Sequence[str], remedy: str) -> None:
    """Refuse an argument that is given and lacks methods that will be called."""
    lacking = [f"{method}()" for method in methods if not callable(getattr(value, method, None))]
    if value is not None and (lacking or isinstance(value, type)):
        has_not = f"has no {' and no '.join(lacking)}" if lacking else "is a class, not an object"
        raise UnsupportedOptionError(f"{name}={shown(value)} {has_not}; {remedy}")


def check_callables(name: str, value: object) -> None:
    """Refuse an argument that is given and is not a list of callables."""
    if value is None:
        return
    if not isinstance(value, list | tuple):
        raise UnsupportedOptionError(f"{name} must be a list, got {shown(value)}; write {name}=[...]")
    wrong = [each for each in value if isinstance(each, type) or not callable(each)]
    if wrong:
        raise UnsupportedOptionError(f"{name} must hold callable objects alone, got {shown(wrong[0])}")


def check_scores(processor: object, found: object, given: Tensor) -> Tensor:
    """Return the scores of a logits processor, `[rows, vocab]`, in any floating dtype; refuse other results."""
    from torch import Tensor

    name = f"the logits processor {type(processor).__name__}"
    if not isinstance(found, Tensor):
        raise UnsupportedOptionError(f"{name} returned {shown(found)}; it must return the scores, changed or not")
    if found.shape != given.shape or not found.dtype.is_floating_point:
        raise UnsupportedOptionError(
            f"{name} returned {found.dtype} of shape {list(found.shape)} for scores of shape {list(given.shape)}; it "
            "must return floating-point scores of the shape it was given"
        )
    return found


def check_weights(model: PreTrainedModel) -> None:
    """Refuse a model whose weights were never loaded.

    Weights that `accelerate` or `selfspec.load` brings in when they are needed are on the meta device too.
    """
    name = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    brought_in = any(hasattr(module, "_hf_hook") or module.__dict__.get("streams") for module in model.modules())
    if name is not None and not brought_in:
        raise UnsupportedModelError(
            f"{name} of {type(model).__name__} is on the meta device, without values; load the model with "
            "from_pretrained, or give it weights with model.to_empty(device=...) and load_state_dict"
        )
