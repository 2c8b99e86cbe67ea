"""What cannot be decoded is refused by name: here, models whose layers lie on several devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import selfspec
from selfspec.model.decodable import check_decodable
from selfspec.model.registry import find_adapter


class _Elsewhere:
    """Stands for a weight on a device that this machine lacks."""

    is_meta = False
    device = torch.device("cuda:1")


def test_layers_on_several_devices_are_refused(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = llama.parameters

    def parameters(*args: Any) -> Iterator[Any]:
        yield from right(*args)
        yield _Elsewhere()

    monkeypatch.setattr(llama, "parameters", parameters)
    with pytest.raises(selfspec.errors.UnsupportedModelError, match=r"lie on cpu and cuda:1.*tp_plan"):
        check_decodable(llama, find_adapter(llama))
