"""Keys and values in 8 bits, with a scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.cache.shared_layer import SharedLayer

_MOST = 127
_SCALES = torch.bfloat16
_SMALLEST = torch.finfo(torch.float32).tiny


class RoundedLayer(SharedLayer):
    """One layer's slots: levels of -127..127, int8, and scales in bfloat16.

    Passes read keys and values as they were rounded, their own tokens' too. So text does not depend on how it was
    drafted, but it is not what exact keys and values give.
    """

    _names = ("keys", "values", "_key_scales", "_value_scales")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        levels = [self._slots_like(states.to(torch.int8)) for states in (key_states, value_states)]
        scales = [self._slots_like(states[..., :1].to(_SCALES)) for states in (key_states, value_states)]
        self._store([*levels, *scales])
        self.is_initialized = True

    def _write_pass(self, key_states: Tensor, value_states: Tensor) -> None:
        levels, scales = self.parts[:2], self.parts[2:]
        for to_levels, to_scales, states in zip(levels, scales, (key_states, value_states), strict=True):
            wide = states.float()
            # Scales are rounded first, and the numbers to multiples of what will be read.
            scale = (wide.abs().amax(-1, keepdim=True) / _MOST).clamp(min=_SMALLEST).to(_SCALES)
            self._write(to_levels, (wide / scale.float()).round_().clamp_(-_MOST, _MOST).to(torch.int8))
            self._write(to_scales, scale)

    def seen(self, width: int) -> tuple[Tensor, Tensor]:
        keys, values, key_scales, value_scales = (self._seen(slots, width) for slots in self.parts)
        return self._read(keys, key_scales), self._read(values, value_scales)

    def held(self) -> tuple[Tensor, Tensor]:
        keys, values, key_scales, value_scales = self.parts
        return self._read(keys, key_scales), self._read(values, value_scales)

    def _begin_like(self, other: SharedLayer) -> None:
        assert isinstance(other, RoundedLayer)
        self.dtype = other.dtype

    def _read(self, levels: Tensor, scales: Tensor) -> Tensor:
        return levels.to(self.dtype).mul_(scales.to(self.dtype))
