"""Captured passes are joined to few launches, whatever the architecture; what they compute: see tests/kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

from helpers import tiny
from helpers.captures import StandIn, as_with_triton, wrapped
from helpers.shrunken import shrunken
from selfspec.draft.registry import parse_draft
from selfspec.formats.packed import Packed
from selfspec.formats.planes import Planes, PlanesLinear, UpperLinear
from selfspec.runtime.noting import noted, noted_pass
from selfspec.runtime.pass_function import PassFunction
from selfspec.runtime.runtime import Function

pytest.importorskip("triton")

from selfspec.runtime import fused


def launches(module: GraphModule) -> Iterator[str]:
    """What a pass launches: all but views; attention in two."""
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None:
            alias = schema.returns[0].alias_info
            if (alias is None or alias.is_write) and node.target is not torch.ops.aten._unsafe_view.default:
                yield str(node.target)
        elif node.op == "call_function" and node.target.__name__ != "getitem":
            yield from [node.target.__name__] * (2 if node.target is fused._attended else 1)


def in_planes(states: Tensor, weights: list[list[Tensor]], gate: str | None = None) -> Tensor:
    """Compute several products in planes, as one launch does."""
    found = []
    for upper, rows, *others in weights:
        parts = {"upper": upper, "rows": rows}
        whole = any(each is not None for each in others)
        if whole:
            parts |= {"lower": others[0], "escapes": others[1]}
        kind = PlanesLinear if whole else UpperLinear
        layer = kind(Packed(torch.Size((len(upper), states.shape[1])), parts), None, states.dtype)
        with mock.patch(f"{kind.__module__}.kernels_of"):
            found.append(functional.linear(states, layer.join()))
    return torch.cat(found, -1) if gate is None else functional.silu(found[0]) * found[1]


def noted_launches(architecture: str, draft: str, layers: int, rows: int) -> dict[str, list[str]]:
    """What captured passes of a model launch, by the format of their weights."""
    found: dict[str, list[str]] = {}

    def note(function: PassFunction, tensors: tuple[Tensor, ...], _: object) -> Function:
        noted = noted_pass(function, tensors, function.masks(tensors))
        path = function.kind.path
        found[str(path.format)] = list(launches(fused.fused(noted, torch.device("cpu"))))
        return function

    def products(states: Tensor, weights: list[Tensor], *_: object) -> Tensor:
        # It launches nothing here.
        return states.new_zeros(len(states), sum(map(len, weights)))

    def rows_in_planes(inputs: int, dtype: torch.dtype, ids: Tensor, *_: object) -> Tensor:
        return torch.zeros(len(ids), inputs, dtype=dtype)

    with (
        as_with_triton(),
        mock.patch("selfspec.kernels.triton_products.joint_product", products),
        mock.patch("selfspec.kernels.triton_planes.joint_in_planes", in_planes),
        mock.patch("selfspec.kernels.triton_planes.rows_in_planes", rows_in_planes),
        mock.patch("selfspec.runtime.cuda_graphs._fused", note),
    ):
        slides = architecture.startswith("gemma")
        types = (["full_attention", "sliding_attention" if slides else "full_attention"] * 2)[:layers]
        kinds: dict[str, Any] = {} if architecture == "llama" else {"layer_types": types}
        model = shrunken(architecture, torch.float32, num_hidden_layers=layers, **kinds)
        if draft == "upper":
            tiny.hold_planes(model.bfloat16().float())
        spec, mask = wrapped(model, StandIn(0, 32), parse_draft(draft)), torch.ones(rows, 5, dtype=torch.long)
        # Several rows write different slots.
        mask[1:, :2] = 0
        spec.generate(tiny.prompt(5, rows), mask, max_new_tokens=6, do_sample=False)
    return found


@pytest.mark.parametrize(
    ("architecture", "draft", "rows"),
    [
        ("llama", "none", 1),
        ("qwen3", "none", 2),
        ("gemma3_text", "none", 1),
        ("llama", "int8", 2),
        ("qwen3", "int4", 1),
        ("llama", "upper", 1),
        ("qwen3", "upper", 2),
        ("gemma3_text", "upper", 1),
    ],
)
def test_a_layer_takes_nine_launches(architecture: str, draft: str, rows: int) -> None:
    few, more = (noted_launches(architecture, draft, layers, rows) for layers in (3, 4))
    assert len(few) == 1 + (draft != "none")
    for copy, launched in few.items():
        assert len(more[copy]) - len(launched) == 9, more[copy]


@pytest.mark.parametrize("parts", [("upper", "rows", "lower", "escapes"), ("upper", "rows")], ids=["planes", "upper"])
def test_products_in_planes_are_joined_to_what_they_are_one_by_one(parts: tuple[str, ...]) -> None:
    from selfspec.kernels.triton_planes import product_in_planes

    weights = [
        [packed[part] for part in parts]
        for packed in (Planes().pack(torch.randn(outputs, 64).bfloat16()) for outputs in (24, 8, 8, 8))
    ]

    def computed(states: Tensor) -> tuple[Tensor, ...]:
        *alone, gate, up = (product_in_planes(states, *weight) for weight in weights)
        return (*alone, functional.silu(gate) * up)

    states = torch.randn(3, 64)
    with mock.patch("selfspec.kernels.triton_planes.joint_in_planes", in_planes):
        expected = computed(states)
        with mock.patch.object(fused, "joint_in_planes", in_planes):
            module = fused.fused(noted(computed, [states]), torch.device("cpu"))
    assert [*launches(module)] == ["in_planes"] * 2
    assert all(map(torch.equal, module(states), expected))
