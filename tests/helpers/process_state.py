"""What a test could leave changed in its process, where it would change what other tests find; what tensors hold."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules import module as modules
from transformers.utils import logging

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
    """The bytes of all tensors of this process that are in memory."""
    gc.collect()
    # Compiling, in another test of this process, may leave tensors without storage behind.
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, Parameter) and not each.is_meta]
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
