"""Everything that could be changed on a model, remembered and compared by identity."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


class Snapshot:
    """What a model is made of: every module's `__dict__`, weights, classes and configs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = {name: (module, _contents(module)) for name, module in model.named_modules()}
        self._classes = {kind: dict(kind.__dict__) for kind in {type(module) for module in model.modules()}}
        self._weights = {
            name: (weight, weight.data_ptr(), weight._version, weight.requires_grad, weight.grad)
            for name, weight in [*model.named_parameters(), *model.named_buffers()]
        }
        self._values = {name: weight.detach().clone() for name, (weight, *_) in self._weights.items()}
        self._state = {name: weight.data_ptr() for name, weight in model.state_dict().items()}
        self._configs = (model.config.to_dict(), model.generation_config.to_dict(), model.training)

    def assert_same(self, model: PreTrainedModel) -> None:
        """Fail if anything of the model is not what it was."""
        now = Snapshot(model)
        assert list(now._modules) == list(self._modules)
        for name, (module, contents) in self._modules.items():
            found, found_contents = now._modules[name]
            assert found is module, name
            assert list(found_contents) == list(contents), name
            for key, value in contents.items():
                assert _same(found_contents[key], value), f"{name}: {key}"
        for kind, attributes in self._classes.items():
            assert list(kind.__dict__) == list(attributes)
            assert all(kind.__dict__[name] is value for name, value in attributes.items())
        for name, weight in self._weights.items():
            assert all(found is old or found == old for found, old in zip(now._weights[name], weight, strict=True)), (
                name
            )
            assert torch.equal(now._values[name], self._values[name])
        assert list(now._state.items()) == list(self._state.items())
        assert now._configs == self._configs


def _contents(module: torch.nn.Module) -> dict[str, Any]:
    """A module's `__dict__` with its containers opened, so that what is put into them shows too."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(found[key] is value for key, value in wanted.items())
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        # Some models note down where positions begin, anew in each call of generate.
        return found is wanted or torch.equal(found, wanted)
    return found is wanted or (isinstance(wanted, (int, float, str, bool)) and bool(found == wanted))
