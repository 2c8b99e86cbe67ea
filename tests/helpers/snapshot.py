"""Everything that could be changed on a model, remembered and compared by identity."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules import module as modules
from transformers import PreTrainedModel
from transformers.utils import logging

from selfspec.kernels import native


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


# Set when a module that needs them is first imported, whichever test that is in; and pytest's own.
_NOT_COMPARED = {
    "CUBLAS_WORKSPACE_CONFIG",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "HF_XET_HIGH_PERFORMANCE",
    "PYTEST_CURRENT_TEST",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}


def process_state() -> dict[str, object]:
    """Settings of the process that all tests in it share, each by a name to report it under."""
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "deterministic algorithms": torch.get_deterministic_debug_mode(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "flushing of denormal numbers": sys.float_info.min / 2 == 0,
        "oneDNN": torch.backends.mkldnn.enabled,
        "kernels of attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "modes of torch": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "hooks on all modules": {
            name: tuple(hooks) for name, hooks in vars(modules).items() if name.startswith("_global") and hooks
        },
        "log level of transformers": logging.get_verbosity(),
        "progress bars of transformers": logging.is_progress_bar_enabled(),
        "garbage collector": gc.isenabled(),
        "handlers of signals": tuple(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))),
        "working folder": Path.cwd(),
        "environment": {name: value for name, value in os.environ.items() if name not in _NOT_COMPARED},
    }


def changed(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """What is not as it was, by name alone: an environment may hold what nobody should read in a log."""
    names: list[str] = []
    for name, value in now.items():
        old = before[name]
        if isinstance(value, dict) and isinstance(old, dict):
            names += [f"{name}: {each}" for each in sorted({*value, *old}) if value.get(each) != old.get(each)]
        elif value != old:
            names.append(name)
    return names


def tensor_bytes() -> int:
    gc.collect()
    # Compiling, in another test of this process, may leave tensors without storage behind.
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, Parameter) and not each.is_meta]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@contextmanager
def kernels(variant: str | None) -> Iterator[None]:
    """Run the kernels of a variant, or none; None: the best that run here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.CHOICE, variant or "")
        native.library.cache_clear()
        yield
    native.library.cache_clear()
