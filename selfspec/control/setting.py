"""Settings, which profiles are bound to: weights, device, dtype, threads and versions."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import transformers
from transformers import PreTrainedModel

from selfspec.environment import device_name
from selfspec.errors import ProfileError
from selfspec.kernels import native
from selfspec.model.identity import check_in_memory, fingerprint
from selfspec.version import __version__


@dataclass(frozen=True)
class Setting:
    """Identifies where costs and acceptance rates were measured; in other settings they differ.

    Attributes:
        fingerprint: of the weights.
        device: the device's own name.
        threads: of the CPU; 0 on other devices, where threads hardly matter.
        kernels: whether the CPU kernels run.
    """

    model: str
    fingerprint: str
    device: str
    dtype: str
    threads: int
    kernels: bool
    selfspec: str
    torch: str
    transformers: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Setting:
        """Return the setting that a model would run in now.

        Raises:
            ProfileError: weights are offloaded, so they have no fingerprint.
        """
        try:
            check_in_memory(model)
        except ValueError as error:
            raise ProfileError(
                f"a calibration profile is bound to the weights, and {error}; load the model whole, or name a draft"
            ) from error
        device = model.device
        return cls(
            model=type(model).__name__,
            fingerprint=fingerprint(model),
            device=device_name(device),
            dtype=str(model.dtype).removeprefix("torch."),
            threads=torch.get_num_threads() if device.type == "cpu" else 0,
            kernels=device.type == "cpu" and native.load_kernels(),
            selfspec=__version__,
            torch=str(torch.__version__),
            transformers=transformers.__version__,
        )

    def differences(self, other: Setting) -> dict[str, tuple[str | int, str | int]]:
        """Return the values that differ, by name: this setting's and the other's."""
        mine, others = asdict(self), asdict(other)
        return {name: (mine[name], others[name]) for name in mine if mine[name] != others[name]}
