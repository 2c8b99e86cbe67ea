"""What `from_pretrained` loads, and what is loaded within a budget: the same tensors, or the same refusal."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec.placement.place import place
from selfspec.placement.plan import Bandwidth, Plan
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk, ReadBuffer


def check_same_tensors(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a checkpoint in both ways and compare everything; return what was loaded within a budget."""
    stock, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    # These hold random numbers.
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    surveyed = survey(str(folder), dtype, 128, FromDisk())
    streamed = surveyed.skeleton.stored.items()
    read = {name: ReadBuffer(where.nbytes).read(surveyed.files, where).to(surveyed.dtype) for name, where in streamed}
    placed = place(surveyed, Plan(len(surveyed.layers), 0, None, 0, Bandwidth(1, 1), 1))
    assert type(placed) is type(stock)
    assert surveyed.dtype == stock.config.dtype
    assert not placed.training
    wanted = dict(stock.named_parameters(remove_duplicate=False))
    found = dict(placed.named_parameters(remove_duplicate=False))
    assert list(found) == list(wanted)
    assert set(read) <= set(wanted)
    for name, weight in wanted.items():
        check_equal(name, found[name], weight)
        if name in read:
            check_equal(name, read[name], weight)
    assert _tied(placed) == _tied(stock)
    buffers = dict(placed.named_buffers(remove_duplicate=False))
    assert list(buffers) == [name for name, _ in stock.named_buffers(remove_duplicate=False)]
    for name, buffer in stock.named_buffers(remove_duplicate=False):
        check_equal(name, buffers[name], buffer)
    assert placed.generation_config.to_dict() == stock.generation_config.to_dict()
    assert placed.config.to_dict() == stock.config.to_dict()
    return placed


def check_equal(name: str, found: Tensor, wanted: Tensor) -> None:
    """Compare tensors bit for bit."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
    assert torch.equal(_bits(found), _bits(wanted)), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tied(model: PreTrainedModel) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), set()).add(name)
    return {frozenset(each) for each in names.values() if len(each) > 1}
