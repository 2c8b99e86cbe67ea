"""Try kernels in Triton against torch's own paths, and use those that agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from selfspec.device import HostCopy

_LOG = logging.getLogger(__name__)
# The oldest CUDA devices whose matrix units can run the kernels in Triton.
_LEAST_CAPABILITY = (8, 0)


@cache
def runs_triton(device: torch.device) -> bool:
    """Return whether kernels in Triton run on a device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


class Trial:
    """Tries a kernel against torch on the first tensors of a kind; if it fails, torch runs, and a warning says so."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._passed: dict[Hashable, bool] = {}

    def run(self, kind: Hashable, kernel: Callable[[], Tensor], stock: Callable[[], Tensor], most: float) -> Tensor:
        """Compute by the kernel if it is trusted, else by torch."""
        if kind not in self._passed:
            expected = stock()
            # A capture cannot wait; the same call ran before it and was tried then, unless the trial was undecided.
            if expected.is_cuda and torch.cuda.is_current_stream_capturing():
                return expected
            return kernel() if self.passes(kind, kernel, expected, most) else expected
        return kernel() if self._passed[kind] else stock()

    def known(self, kind: Hashable) -> bool | None:
        """Return whether the kernel is trusted; None if it has not been tried."""
        return self._passed.get(kind)

    def passes(self, kind: Hashable, kernel: Callable[[], Tensor], expected: Tensor, most: float) -> bool:
        """Try the kernel for a kind, and note whether its result is as expected. Waits for the device."""
        try:
            found = kernel()
            off = (found.double() - expected.double()).abs().amax() / expected.double().abs().amax().clamp(min=1e-30)
            value = _read(off)
            # Numbers that are not finite leave the trial undecided.
            if value != value and not _read(expected.isfinite().all().double()):
                return False
            failure = None if value <= most else f"is off by {value:.2g}"
        # Compilers and drivers raise many types of errors; torch's path is right in every case.
        except Exception as error:
            failure = f"failed: {error}"
        self._passed[kind] = failure is None
        if failure is not None:
            _LOG.warning("%s in Triton %s; torch's own runs instead (%s)", self._name, failure, kind)
        return failure is None


def _read(number: Tensor) -> float:
    """Return the value of a tensor of one number."""
    copy = HostCopy(number)
    # Modes that forbid a pass to read values apply to one thread, and this value does not steer the pass.
    with ThreadPoolExecutor(1) as other:
        return other.submit(lambda: float(copy.read())).result()
