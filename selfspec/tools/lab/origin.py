"""Whose figures they are: the weights that were measured, and what else a result of the lab depends on here and now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.environment import environment
from selfspec.errors import BenchError
from selfspec.measure.stock import end_tokens
from selfspec.model.fingerprint import fingerprint

# Of a configuration: where it was read from and by what, which changes nothing. Its dtype is the model's own.
_UNSAID = {"_name_or_path", "architectures", "dtype", "transformers_version"}


@dataclass(frozen=True)
class Origin:
    """What makes two measurements ones of the same thing; a part of every key of the lab.

    Attributes:
        base: fingerprint of the weights as they are, shortened.
        setting: digest of these and all else: dtype, configuration, end tokens, device, threads, versions, kernels.
    """

    base: str
    setting: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Origin:
        """Return what is measured of a model now.

        Raises:
            BenchError: its weights are offloaded, so that they cannot be told from others.
        """
        try:
            base = fingerprint(model, torch.float32)
        except ValueError as reason:
            raise BenchError(f"figures belong to weights, and {reason}: load the model whole") from reason
        setting = [
            base,
            str(model.dtype),
            json.loads(model.config.to_json_string(use_diff=False), object_hook=_said),
            model.config._attn_implementation,
            sorted(end_tokens(model)),
            environment(model.device),
        ]
        return cls(base[:20], hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:20])

    @property
    def short(self) -> str:
        """The weights, in reports."""
        return self.base[:8]


def _said(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _UNSAID}


def told_apart(models: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return what reports call models, by name and weights: where a name has several weights it is followed by them."""
    every = list(dict.fromkeys(models))
    names = [name for name, _ in every]
    return {(name, base): name if names.count(name) == 1 else f"{name} {base[:8]}" for name, base in every}
