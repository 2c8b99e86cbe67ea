"""The weights that passes read."""

from __future__ import annotations

import pytest
import torch

import selfspec
from helpers import tiny
from selfspec.adapters import ADAPTERS
from selfspec.draft.early_exit import ExitAdapter
from selfspec.model.early_head import DraftHead
from selfspec.model.layer_path import LayerPath
from selfspec.model.summary import describe, share_read


def test_exits_cost_what_inspect_says(architecture: str) -> None:
    model = tiny.BUILDERS[architecture]()
    adapter = ADAPTERS[architecture]
    for choice in describe(model).exits:
        path = selfspec.drafts.EarlyExit(choice.layer).path(tiny.DEPTH)
        assert share_read(model, adapter, path) == pytest.approx(choice.cost_ratio)
    assert share_read(model, adapter, LayerPath.full(tiny.DEPTH)) == 1.0


def test_a_skip_set_saves_what_it_leaves_out() -> None:
    model, adapter = tiny.llama(), ADAPTERS["llama"]
    anatomy = describe(model)
    saved = anatomy.layers[1].attention.weights.bytes + anatomy.layers[2].mlp.weights.bytes
    path = selfspec.drafts.LayerSkip(attention=[1], mlp=[2]).path(tiny.DEPTH)
    assert share_read(model, adapter, path) == pytest.approx(1 - saved / anatomy.target_bytes_read)


def test_a_head_counts_with_the_rows_it_reads_and_the_adapter_before_it() -> None:
    model, adapter = tiny.llama(), ADAPTERS["llama"]
    path, anatomy = selfspec.drafts.EarlyExit(2).path(tiny.DEPTH), describe(model)
    own = ExitAdapter(model.config.hidden_size, 8)
    head = DraftHead(own, torch.arange(10))
    rows = anatomy.head.bytes * 10 // anatomy.vocabulary
    weights = sum(weight.numel() for weight in own.parameters()) * model.dtype.itemsize
    wanted = share_read(model, adapter, path) + (rows - anatomy.head.bytes + weights) / anatomy.target_bytes_read
    assert share_read(model, adapter, path, head) == pytest.approx(wanted)
