"""Checks of kernels in Triton. As a program with a part's name and TRITON_INTERPRET=1: by its interpreter on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import selfspec
from helpers import tiny
from helpers.captures import StandIn, StandInRecorder, as_with_triton, assert_stock, wrapped
from helpers.drafting import GREEDY, Oracle, stock
from helpers.reference import every_number, few_octaves, restored
from helpers.shrunken import shrunken
from selfspec.cache.tree import Tree
from selfspec.draft.registry import parse_draft
from selfspec.formats import int4, int8, planes, rounding
from selfspec.formats.format import formats
from selfspec.formats.int4 import Int4Linear
from selfspec.formats.int8 import Int8Linear
from selfspec.formats.packed import Packed
from selfspec.formats.planes import Planes, PlanesLinear, Upper, UpperLinear
from selfspec.formats.rounding import Kernels
from selfspec.kernels import native
from selfspec.runtime.cuda_graphs import Launch, Recorder, Recording

PRODUCTS = [(64, 128), (70, 96), (5, 768), (33, 2080)]
# Of inputs that no group divides.
IN_8_BITS = [(9, 37)]
ROWS = [1, 3, 16, 17]
GROUPS = (64, 128, 256)
PRODUCT_OFF_BY = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def held_by_triton(rounded: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Holds the factors, levels and scales that a product in Triton reads, as a layer keeps them."""
    with ExitStack() as inside:
        for module in (int4, int8, rounding):
            inside.enter_context(mock.patch.object(module, "kernels_of", return_value=Kernels.TRITON))
        layer = (Int4Linear if "zeros" in rounded.parts else Int8Linear)(rounded, None, torch.float32)
    return layer.factors, layer.levels, layer.scales


def check_product(device: str, bits: int, rows: int, dtype: torch.dtype, group: int = 32) -> None:
    """Products of all sizes, of states that are not contiguous, are those of what the rounded weights say."""
    from selfspec.kernels.triton_products import low_bits_product

    for outputs, inputs in PRODUCTS + IN_8_BITS * (bits == 8):
        if bits == 4 and inputs % group:
            continue
        kind: Any = formats()[f"int{bits}"]
        rounded = (kind() if bits == 8 else kind(group)).pack(
            (torch.randn(outputs, inputs) * torch.rand(inputs)).to(device)
        )
        states = torch.randn(rows, 2 * inputs).to(device, dtype)[:, ::2]
        found = low_bits_product(states, *held_by_triton(rounded))
        expected = states.double() @ restored(rounded).double().T
        assert found.dtype == dtype
        off = (found.double() - expected).norm() / expected.norm()
        assert off < PRODUCT_OFF_BY[dtype], f"{bits} bits, {rows} rows, {outputs} x {inputs}, {dtype}: off by {off:.2g}"


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_by_tanh": partial(functional.gelu, approximate="tanh"),
}


def check_joint(device: str, rows: int, dtype: torch.dtype) -> None:
    """Several products in one launch are torch's, with biases, gates and in few bits; sizes fill no block."""
    from selfspec.kernels.triton_products import joint_product

    made = partial(torch.randn, device=device, dtype=dtype)
    states, weights = made(rows, 176), [made(outputs, 176) for outputs in (33, 9, 70)]
    biases = [made(len(each)) for each in weights]
    expected = [states.double() @ each.double().T for each in weights]
    several = torch.cat([one + bias for one, bias in zip(expected, biases, strict=True)], 1)
    found = {"several": (joint_product(states, weights, biases=biases), several)}
    for name, gate in GATES.items():
        twice = [weights[0], weights[0].flip(0).contiguous()]
        joint = joint_product(states / 8, twice, gate=name)
        found[name] = joint, gate(expected[0] / 8) * (expected[0].flip(1) / 8)
    for bits in (8, 4):
        rounded = [formats()[f"int{bits}"]().pack(torch.randn(outputs, 96).to(device)) for outputs in (33, 9)]
        factors, levels, scales = map(list, zip(*map(held_by_triton, rounded), strict=True))
        some = [states[:, :96].double() @ restored(each).double().T for each in rounded]
        found[f"{bits} bits"] = joint_product(states[:, :96], levels, factors, scales), torch.cat(some, 1)
    for name, (given, wanted) in found.items():
        off = (given.double() - wanted).norm() / wanted.norm()
        assert off < PRODUCT_OFF_BY[dtype], f"{name}, {rows} rows, {dtype}: off by {off:.2g}"


ATTENTION_OFF_BY = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Of batch, heads, heads of keys, tokens, slots, width and value width: chains, trees of 17 rows and more, runs to join.
ATTENTION = [(1, 4, 4, 1, 5, 16, 16), (2, 6, 2, 3, 70, 24, 40), (3, 8, 2, 17, 33, 64, 64), (2, 4, 1, 5, 600, 48, 48)]


def block_mask(batch: int, tokens: int, slots: int, window: int | None = None) -> Tensor:
    """What the nodes of a tree see at the end of rows of several lengths, `[batch, 1, tokens, slots]`.

    What lies past a row's block is masked, and so is the left padding of every other row.
    """
    mask = torch.zeros(batch, 1, tokens, slots, dtype=torch.bool)
    for row in range(batch):
        start = max(0, slots - tokens - 3 * row)
        for token in range(tokens):
            seen = [start + token]
            while token:
                token = (token - 1) // 2
                seen.append(start + token)
            mask[row, 0, seen[0] - start, :start] = True
            mask[row, 0, seen[0] - start, seen] = True
        mask[row, 0, :, : 2 * (row % 2)] = False
        if window is not None:
            mask[row, 0, :, : max(0, start - window)] = False
    return mask


def check_attention(device: str, shape: tuple[int, ...], dtype: torch.dtype, seen: tuple[int | None, bool]) -> None:
    """Attention of a tree, over tensors that are not contiguous, is torch's."""
    from selfspec.kernels.triton_attention import block_attention

    (batch, heads, key_heads, tokens, slots, width, value_width), (window, added) = shape, seen
    made = partial(torch.randn, device=device, dtype=dtype)
    queries = made(batch, tokens, heads, width).transpose(1, 2)
    keys = made(batch, key_heads, slots + 9, 2 * width)[:, :, :slots, ::2]
    values = made(batch, key_heads, slots + 9, value_width)[:, :, :slots]
    mask = block_mask(batch, tokens, slots, window).to(device)
    if added:
        # For each head its own, as with slopes.
        mask = torch.where(mask, made(heads, 1, slots), torch.finfo(dtype).min)
    scale = 1.3 * width**-0.5
    found = block_attention(queries, keys, values, mask, scale)
    exact = mask.double() if added else mask
    expected = functional.scaled_dot_product_attention(
        queries.double(), keys.double(), values.double(), attn_mask=exact, scale=scale, enable_gqa=True
    )
    assert found.dtype == dtype
    off = (found.double() - expected.transpose(1, 2)).abs().amax() / expected.abs().amax()
    assert off < ATTENTION_OFF_BY[dtype], f"{shape}, {dtype}, window {window}, added {added}: off by {off:.2g}"


def check_unseen(device: str) -> None:
    """What nobody sees is not read, and a token that sees nothing gets zeros."""
    from selfspec.kernels.triton_attention import block_attention

    queries = torch.randn(1, 2, 2, 16, device=device)
    keys, values = torch.randn(2, 1, 1, 300, 16, device=device)
    mask = torch.ones(1, 1, 2, 300, dtype=torch.bool, device=device)
    mask[..., 1, :] = mask[..., 280:] = False
    whole = block_attention(queries, keys, values, mask, 0.25)
    keys[:, :, 280:] = values[:, :, 280:] = torch.nan
    assert torch.equal(block_attention(queries, keys, values, mask, 0.25), whole)
    assert whole[:, 0].abs().min() > 0
    assert not whole[:, 1].any()


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8)
# Of three rows: one moves all, one some and then stays, one stays; and where they go.
SOURCES, TARGETS = [[3, 5, 9], [8, 7, 8], [1, 2, 3]], [[2, 3, 4], [6, 7, 8], [1, 2, 3]]


def check_slots(device: str, dtype: torch.dtype) -> None:
    """Slots of layers of several sizes are moved as torch moves them, and all else stays."""
    from selfspec.kernels.triton_slots import moved_at_once, slots_moved

    stored = [
        (torch.randn(4, heads, 12, width) * 50).to(dtype).to(device) for heads, width in ((2, 24), (3, 1), (2, 24))
    ]
    # The first rows of what is stored.
    parts = [each[:3] for each in stored]
    sources, targets, rows = (torch.tensor(each, device=device) for each in (SOURCES, TARGETS, range(3)))
    expected = [each.clone() for each in stored]
    moves = slots_moved, moved_at_once, moved_at_once
    for move in moves:
        for each in expected:
            each[rows[:, None], :, targets] = each[rows[:, None], :, sources]
        assert move(parts, sources, targets) in (None, True)
        assert all(torch.equal(one, other) for one, other in zip(stored, expected, strict=True)), (dtype, move)


NORM_OFF_BY = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WIDTHS = (1, 48, 64, 1003)
# Rows, heads, heads of keys, tokens and width.
HEADS = ((1, 4, 2, 1, 64), (3, 3, 3, 5, 10), (2, 9, 3, 2, 80))


def check_norms(device: str, dtype: torch.dtype) -> None:
    """Norms of tokens are the module's, and a token's are the same beside others."""
    from selfspec.kernels.triton_norms import rms_norm

    for width in WIDTHS:
        module = LlamaRMSNorm(width, eps=1e-3).to(device, dtype)
        module.weight.data.normal_()
        states = 10 * torch.randn(2, width, 3).to(device, dtype).transpose(1, 2)
        found, expected = rms_norm(states, module.weight.data, 1e-3), module(states).detach()
        assert found.dtype == dtype
        off = (found.double() - expected.double()).abs().amax() / expected.double().abs().amax()
        assert off <= NORM_OFF_BY[dtype], (width, dtype, off)
        assert torch.equal(rms_norm(states[:1, 1:2], module.weight.data, 1e-3), found[:1, 1:2])


def check_added_norms(device: str, dtype: torch.dtype) -> None:
    """A sum and its norm are torch's, with a norm of what is added or none."""
    from selfspec.kernels.triton_norms import added_norm

    for width, shift in product(WIDTHS, (0.0, 1.0)):
        states, residual = torch.randn(2, 3, 2, width).to(device, dtype).unbind()
        weight, first = torch.randn(2, width).to(device, dtype)
        for before in (None, (first, 1e-2, shift)):
            wide = states.double() if before is None else _normed(states, *before)
            total = wide + residual.double()
            given = added_norm(states, residual, weight, 1e-3, shift, before)
            # The norm of the sum as it was rounded: little may be left of it.
            for found, expected in zip(given, (total, _normed(given[0], weight, 1e-3, shift)), strict=True):
                off = (found.double() - expected).abs().amax() / expected.abs().amax()
                assert off <= 2 * NORM_OFF_BY[dtype], (width, shift, before, dtype, off)


def _normed(states: Tensor, weight: Tensor, epsilon: float, shift: float) -> Tensor:
    wide = states.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * (weight.double() + shift)


def check_cache(device: str, dtype: torch.dtype) -> None:
    """Queries are turned, keys turned and written, values written as torch does, after norms of heads or none."""
    from selfspec.kernels.triton_rotary import rotated_to_cache

    for rows, heads, key_heads, tokens, width in HEADS:
        made = [_heads(rows, tokens, each, width).to(device, dtype) for each in (heads, key_heads, key_heads)]
        angles = torch.randn(1, tokens, width, device=device)
        turns = [each.to(dtype) for each in (angles.cos(), angles.sin())]
        weights = 1 + torch.randn(2, width).to(device, dtype) / 8
        places = torch.stack([torch.randperm(9, device=device)[:tokens] for _ in range(rows)])
        for slots, norms in product((places, places[0]), (None, (weights[0], weights[1]))):
            turned = made[:2]
            if norms is not None:
                turned = [_normed(each, one, 1e-3, 1.0).to(dtype) for each, one in zip(made, norms, strict=False)]
            expected = [*apply_rotary_pos_emb(*turned, *turns), made[2]]
            buffers = torch.full((2, rows, key_heads, 9, width), torch.nan, device=device, dtype=dtype).unbind()
            given: tuple[Any, ...] = (*made, *turns, buffers, slots, norms, 1e-3, 1.0)
            queries = rotated_to_cache(*given)
            at = torch.arange(rows, device=device)[:, None]
            kept = [each[at, :, slots.expand(rows, tokens)].transpose(1, 2) for each in buffers]
            for found, wanted in zip((queries, *kept), expected, strict=True):
                torch.testing.assert_close(
                    found,
                    wanted,
                    rtol=2e-2 if dtype.itemsize == 2 else 1e-5,
                    atol=5e-2 if dtype.itemsize == 2 else 1e-5,
                )
            assert all((~each.isnan()).sum() == made[1].numel() for each in buffers)


def _heads(rows: int, tokens: int, heads: int, width: int) -> Tensor:
    return torch.randn(rows, tokens, heads, width).transpose(1, 2)


SEAMS = ("selfspec.cache.shared_cache", "selfspec.runtime.few_rows")
KERNELS = {
    "block_attention": "triton_attention",
    "slots_moved": "triton_slots",
}


def check_decoding(tree: Tree, used: int, sampled: dict[str, Any]) -> None:
    """Drafts in a batch, with grouped queries and windows, give the text that they give without these kernels."""
    model, ids = tiny.mistral(), tiny.prompt(9, batch=3)
    greedy = stock(model, ids, 8)
    spec = selfspec.wrap(
        model, Oracle(tree, greedy[:, 9:]), draft_length=len(tree), accept="token", runtime=selfspec.runtime.Eager()
    )
    expected = spec.generate(ids, max_new_tokens=8, **sampled).sequences
    assert torch.equal(expected, greedy) == (sampled == GREEDY)
    with ExitStack() as inside:
        for seam in SEAMS:
            inside.enter_context(mock.patch(f"{seam}.runs_triton", return_value=True))
        watched = {
            name: inside.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
            for module, name in ((import_module(f"selfspec.kernels.{file}"), name) for name, file in KERNELS.items())
        }
        assert torch.equal(spec.generate(ids, max_new_tokens=8, **sampled).sequences, expected)
    calls = {name: each.call_count for name, each in watched.items()}
    # A kernel that is not trusted is called no more: once for each kind of call.
    assert sum(count > 2 for count in calls.values()) == used, calls


# Weights in planes.

PLANE_SIZES = [(3, 37), (33, 72), (2, 1100)]
PLANE_PARTS = ("upper", "rows", "lower", "escapes")
PLANE_ROWS = [1, 3, 17, 65]
PLANES_OFF_BY = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-2}


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Layers in planes run by kernels of this name."""
    by_name = mock.patch.object(planes, "kernels_of", return_value=Kernels[name])
    with by_name, mock.patch.object(native, "available", return_value=False):
        yield


def all_escapes(packed: Packed, weight: Tensor) -> Packed:
    """The same weight, of which planes hold nothing."""
    outputs, inputs = weight.shape
    column = torch.arange(inputs, device=weight.device)
    place = column // 32 * 32 + column % 16 * 2 + column // 16 % 2
    order = place.argsort()
    bits = weight.view(torch.int16).to(torch.int32) & 0xFFFF
    ends = torch.arange(1, outputs + 1, device=weight.device) * inputs
    parts = {
        "upper": torch.full_like(packed["upper"], 0x55),
        "lower": torch.full_like(packed["lower"], 0xAA),
        "rows": torch.stack([packed["rows"][0], ends.to(torch.int32)]),
        "escapes": (place << 16 | bits)[:, order].flatten().to(torch.int32),
    }
    return Packed(weight.shape, parts)


def check_planes(device: str, rows: int, dtype: torch.dtype) -> None:
    """Joined weights have their bits, and products are those of the weight, of the upper plane too."""
    for outputs, inputs in PLANE_SIZES:
        weight = few_octaves(outputs, inputs).to(device)
        whole = PlanesLinear(Planes().pack(weight), None, dtype)
        draft = UpperLinear(Upper().pack(whole.weight), None, dtype)
        states = torch.randn(rows, 2 * inputs).to(device, dtype)[:, ::2]
        for layer in (whole, draft):
            with kernels("ATEN"):
                joined = layer.join()
            with kernels("TRITON"):
                assert torch.equal(layer.join(), joined)
                found, expected = layer.product(states), states.double() @ joined.double().t()
            assert found.dtype == dtype
            off = (found.double() - expected).norm() / expected.norm()
            assert off < PLANES_OFF_BY[dtype], (
                f"{type(layer)}, {rows} rows, {outputs} x {inputs}, {dtype}: off by {off:.2g}"
            )


def check_joint_planes(device: str, rows: int, dtype: torch.dtype) -> None:
    """Several products in one launch have the bits that they have alone; two of them gate one another."""
    from selfspec.kernels.triton_planes import joint_in_planes, product_in_planes

    packed = [Planes().pack(few_octaves(outputs, 83, seed).to(device)) for seed, outputs in enumerate((33, 9, 9))]
    states = torch.randn(rows, 83).to(device, dtype)
    for parts in (PLANE_PARTS, PLANE_PARTS[:2]):
        weights = [[each[part] for part in parts] for each in packed]
        alone = [product_in_planes(states, *weight) for weight in weights]
        assert torch.equal(joint_in_planes(states, weights), torch.cat(alone, 1))
        gated = joint_in_planes(states, weights[1:], "silu")
        expected = functional.silu(alone[1].double()) * alone[2].double()
        off = (gated.double() - expected).norm() / expected.norm()
        assert off < PRODUCT_OFF_BY[dtype], f"{parts}, {rows} rows, {dtype}: off by {off:.2g}"


def check_bits_of_planes(device: str) -> None:
    """Every number comes back, by the number of its row; an id without a row is NaN."""
    from selfspec.kernels.triton_planes import rows_in_planes

    numbers = every_number(torch.bfloat16)
    weight = numbers[torch.randperm(len(numbers))].view(-1, 128).to(device)
    with mock.patch("selfspec.formats.planes._MOST_ESCAPES", 1.0):
        packed = Planes().pack(weight)
    # The interpreter takes too long for all of them.
    some = torch.arange(len(weight)) if device != "cpu" else torch.tensor([511, 3, 0])
    ids = torch.cat([some, torch.tensor([512, -1])]).to(device)
    found = rows_in_planes(128, torch.bfloat16, ids, *map(packed.parts.get, PLANE_PARTS))
    assert torch.equal(found[:-2].view(torch.int16), weight[ids[:-2]].view(torch.int16))
    assert found[-2:].isnan().all()


def check_order_of_planes(device: str, rows: int, dtype: torch.dtype) -> None:
    """A product does not depend on what is in planes and what beside them, to the last bit."""
    from selfspec.kernels.triton_planes import product_in_planes

    weight = few_octaves(3, 83).to(device)
    packed = Planes().pack(weight)
    states = torch.randn(rows, 83).to(device, dtype)
    products = [
        product_in_planes(states, *map(each.parts.get, PLANE_PARTS)) for each in (packed, all_escapes(packed, weight))
    ]
    assert torch.equal(*products)


def decoding() -> None:
    drawn = {"do_sample": True, "seed": 3, "eos_token_id": None, "pad_token_id": 0, "accept": "block"}
    check_decoding(Tree((-1, -1, 0, 0, 1)), 2, GREEDY)
    check_decoding(Tree.chain(3), 1, drawn)


class AgainRecorder(StandInRecorder):
    """Runs what it captured once more, since launches of kernels are no operations of torch."""

    def record(self, launch: Launch) -> Recording:
        self.captured += 1
        outputs = launch()

        def replay() -> None:
            for output, again in zip(outputs, launch(), strict=True):
                output.copy_(again)

        return Recording(replay, outputs)


@dataclass(frozen=True)
class AgainCaptured(StandIn):
    def recorder(self, device: torch.device) -> Recorder:
        return AgainRecorder()


def check_fused(architecture: str, draft: str | None, rows: int) -> None:
    """Captured passes in few launches give the model's own text."""
    kinds: dict[str, Any] = {"layer_types": ["full_attention"] * 2} if architecture == "qwen3" else {}
    if architecture == "gemma3_text":
        kinds["layer_types"] = ["full_attention", "sliding_attention"]
    model = shrunken(architecture, torch.float32, num_hidden_layers=2, **kinds)
    with as_with_triton(), mock.patch("selfspec.runtime.cuda_graphs._LOG.warning") as warned:
        spec = wrapped(model, AgainCaptured(0, 64), None if draft is None else parse_draft(draft))
        prompt = tiny.prompt(5, rows)
        assert_stock(spec, prompt, 4)
        # Several rows write different slots.
        mask = torch.arange(5) >= 2 * torch.arange(rows)[:, None]
        options: dict[str, Any] = {"attention_mask": mask.long(), "max_new_tokens": 4, "do_sample": False}
        expected = model.generate(prompt, **options)
        assert torch.equal(spec.generate(prompt, **options).sequences, expected)
    assert not warned.called, warned.call_args
    assert spec.programs.proved
    assert not spec.programs.refusals


def fused() -> None:
    for given in (("llama", "int8", 1), ("qwen3", None, 2), ("gemma3_text", None, 1)):
        check_fused(*given)


Given = Iterable[tuple[Any, ...]]
CHECKS: dict[str, list[tuple[Callable[..., None], Given]]] = {
    "products": [
        (check_product, product((8, 4), ROWS, PRODUCT_OFF_BY)),
        (check_product, product((4,), (1, 3), (torch.float32,), GROUPS)),
        (check_joint, product((1, 3, 17), (torch.float32, torch.float16, torch.bfloat16))),
    ],
    "planes": [
        (check_bits_of_planes, [()]),
        (check_planes, product(PLANE_ROWS, PLANES_OFF_BY)),
        (check_order_of_planes, product(PLANE_ROWS, PLANES_OFF_BY)),
        (check_joint_planes, product((1, 3), (torch.float32, torch.bfloat16))),
    ],
    "attention": [
        (check_attention, product(ATTENTION, ATTENTION_OFF_BY, ((None, False), (20, False), (None, True)))),
        (check_unseen, [()]),
    ],
    "others": [
        (check_slots, product(DTYPES)),
        (check_norms, product(NORM_OFF_BY)),
        (check_added_norms, product(NORM_OFF_BY)),
        (check_cache, product((torch.float32, torch.float16, torch.bfloat16))),
    ],
}
"""Checks by part, each with what it is given besides a device."""


def interpreted(check: Callable[..., None], given: tuple[Any, ...]) -> bool:
    """Return whether the interpreter computes a check rightly: it takes matrices in bfloat16 for integers."""
    # Others take minutes.
    if check in (check_order_of_planes, check_joint_planes):
        return given in ((1, torch.float32), (3, torch.float32))
    if check in (check_attention, check_product) and torch.float16 in given:
        return False
    if check is check_planes and torch.float64 in given:
        return bool(given[0] < 17)
    if torch.bfloat16 not in given or check in (
        check_slots,
        check_norms,
        check_added_norms,
        check_cache,
    ):
        return True
    return (
        (check is check_joint and given[0] == 1)
        or (check is check_product and given[1] == 1)
        or (check is check_planes and not 1 < given[0] < 65)
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    part = sys.argv[1]
    for whole in (decoding, fused):
        if part == whole.__name__:
            whole()
    for check, every in CHECKS.get(part, []):
        for given in every:
            if interpreted(check, given):
                check("cpu", *given)
    print("all equal")
