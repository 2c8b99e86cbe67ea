"""UNO: a LoRA of the target that mask rows alone use, so that one pass of one model verifies and drafts.

Behind each token the pass reads masks: tokens without meaning, which guess the tokens after the next one by the LoRA.
The guesses behind the last accepted token are the next draft. The target's own tokens see no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.draft import Budget, Draft, Verdict
from selfspec.draft.drafter import MODEL, OwnBytes, drafter
from selfspec.draft.heads.folder import FromFolder, linear_layers
from selfspec.draft.heads.head import check_for_head
from selfspec.draft.rows_view import RowsView, made_once
from selfspec.draft.tree_growth import KeepingProposer, Read, committed_places, grow
from selfspec.errors import HeadError, UnsupportedModelError
from selfspec.model.gated_view import Features
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.layer_path import Lora, LoraRows
from selfspec.model.sizes import bytes_read
from selfspec.runtime.request import Behind, PassRequest, PassResult
from selfspec.runtime.runtime import with_kernels

PREFIX = "base_model.model."
"""Prefix of layer names in the files of `peft`."""

BOUND, LOWEST, DEPTH = "uno_mask_token_id", "uno_noise_low", "uno_depth"
"""Optional fields of adapter_config.json: the id that mask ids lie below, the least mask id, and masks per token."""

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
# Masks behind a token that published LoRAs were trained for, where the config does not say.
_USUAL = 7
# A prime, so that consecutive places take ids that are far apart.
_STRIDE = 2654435761


@drafter("uno", argument=":FOLDER", help="a LoRA for mask rows that the pass which verifies reads, too (UNO)")
@dataclass(frozen=True)
class Uno(FromFolder):
    """Drafts with mask rows in the target's own pass (UNO, 2026), whose LoRA is in the layout of `peft`.

    A draft is a chain of k tokens if a pass has room for k (k + 2) tokens beside the last committed one: k masks behind
    each of k + 1 tokens. If there is no room even for k = 1, passes that verify and passes that guess take turns.
    """

    _config: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    branches = True
    holds = "LoRA of linear layers"

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes, config = self._shapes, self._config
        pairs = {name: name.removesuffix(_DOWN) + _UP for name in shapes if name.endswith(_DOWN)}
        odd = {*pairs, *pairs.values()} ^ set(shapes)
        odd |= {name for name, up in pairs.items() if not odd and shapes[name][0] != shapes[up][1]}
        odd |= {name for name in ("alpha_pattern", "use_dora", "modules_to_save") if config.get(name)}
        if config.get("peft_type") != "LORA" or not isinstance(config.get("lora_alpha"), int | float) or not pairs:
            odd.add("its adapter_config.json")
        if odd:
            raise HeadError(f"{self.source} holds no LoRA of linear layers alone: see {min(odd)}, and docs/heads.md")

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        super().check_model(model, adapter)
        check_for_head(model, "a LoRA of mask rows", self.weight_format)
        prefix = ".".join(adapter.path(model)) + "."
        own = {name: module for name, module in model.named_modules() if name.startswith(prefix)}
        for name, shape in self._shapes.items():
            place = name.removeprefix(PREFIX).rpartition(".lora_")[0]
            # The second names are those of GPT-2's layers.
            sizes = (("in_features", "nx"), 1) if name.endswith(_DOWN) else (("out_features", "nf"), 0)
            if shape[sizes[1]] not in [getattr(own.get(place), size, None) for size in sizes[0]]:
                raise self.foreign(f"its weight {name} is {list(shape)}, and {place} is no such linear layer here")
            check_whole_passes(place, adapter)
        low, bound = self._ids(model)
        known = weight_of(model.get_input_embeddings()).shape[0]
        if type(low) is not int or type(bound) is not int or not 0 <= low < bound <= known:
            raise HeadError(
                f"{self.source} masks with tokens from {low} on and below {bound}; this model knows {known}"
            )
        if type(self._depth) is not int or self._depth < 1:
            raise HeadError(f"{self.source} says {DEPTH}={self._depth!r}; it is the masks behind a token, 1 or more")

    def _ids(self, model: PreTrainedModel) -> tuple[int, int]:
        """Return the least mask id, and the first id above the mask ids."""
        return self._config.get(LOWEST, 1), self._config.get(BOUND, vocabulary_size(model))

    @property
    def _depth(self) -> int:
        depth: int = self._config.get(DEPTH, _USUAL)
        return depth

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        # A draft step uses guesses of the pass before it; the LoRA is read together with the target's weights.
        return self.own_bytes(model).weights // _USUAL / bytes_read(model, adapter)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        guesses = self._depth * vocabulary_size(model) * model.dtype.itemsize
        return super().own_bytes(model) + OwnBytes(row=guesses)

    def begin(self, rows: RowsView) -> UnoProposer:
        return UnoProposer(rows.size, made_once(rows, self, self._lora), self._depth, self._ids(rows.runner.model))

    @torch.no_grad()
    def _lora(self, model: PreTrainedModel) -> Lora:
        weights, alpha = {}, self._config["lora_alpha"]
        for name, weight in self.weights().items():
            place = name.removeprefix(PREFIX).removesuffix(".weight")
            rank = weight.shape[1] ** 0.5 if self._config.get("use_rslora") else weight.shape[1]
            scaled = weight if name.endswith(_DOWN) else weight * (alpha / rank)
            weights[f"{place}.weight"] = scaled.to(model.device, model.dtype)
        layers = with_kernels(linear_layers(weights, self.weight_format))
        named = {name.replace("/", "."): layer for name, layer in layers.named_children()}
        down, up = (
            {name.removesuffix(side): layer for name, layer in named.items() if name.endswith(side)}
            for side in (".lora_A", ".lora_B")
        )
        return Lora(down, up)


def check_whole_passes(name: str, adapter: Adapter) -> None:
    """Refuse a LoRA of a layer with a recurrent state, which reads a pass token by token and knows no places."""
    if set(name.split(".")) & set(adapter.recurrent):
        raise UnsupportedModelError(
            f"{name} has a state and reads a pass token by token, where a LoRA of the last ones alone has no place; "
            "draft with something else, or leave such layers out of the LoRA"
        )


def mask_ids(places: Tensor, low: int, bound: int) -> Tensor:
    """Return mask ids from `low` to below `bound` by place in the text alone, so that other rows do not change them."""
    return low + (places * _STRIDE) % (bound - low)


def levels_within(budget: Budget, most: int) -> int:
    """Return the largest k, at most `most`, for which a chain of k tokens with k masks behind each fits; at least 1."""
    return max(1, min(isqrt(budget.nodes + 1) - 1, budget.depth, most))


@lru_cache(maxsize=256)
def _with_masks(length: int, levels: int) -> Tree:
    """Return a chain with a chain of masks behind the root and behind each node, the root's masks first."""
    parents = list(range(-1, length - 1))
    for end in range(-1, length):
        parents += [end, *range(len(parents), len(parents) + levels - 1)]
    return Tree(tuple(parents))


@dataclass(frozen=True)
class MaskRows(Behind):
    """Adds masks, `[rows, tokens]`, behind a draft; they alone use `lora`. `block` is the tree of draft and masks."""

    tokens: Tensor
    block: Tree
    lora: Lora

    def tree(self, draft: Tree) -> Tree:
        return self.block

    def run(self, request: PassRequest, tree: Tree, run: Callable[[PassRequest], PassResult]) -> PassResult:
        width = request.width
        path = replace(request.path, lora=LoraRows(self.lora, width))
        result = run(replace(request, path=path, tokens=torch.cat([request.tokens, self.tokens], 1)))
        return replace(result.first(width), behind=result.logits[:, width:])


class UnoProposer(KeepingProposer):
    """Grows chains from the guesses of masks in the pass before; it keeps `[levels, vocab]` of each row."""

    def __init__(self, rows: int, lora: Lora, depth: int, ids: tuple[int, int]) -> None:
        super().__init__(rows, [*lora.down.values(), *lora.up.values()])
        self._lora, self._depth, self._ids = lora, depth, ids
        # Number of masks behind each token of the last pass, and the number that each row would have had alone.
        self._levels = 0
        self._alone: dict[int, int] = {}

    @property
    def row_bytes(self) -> int:
        return sum(0 if kept is None else kept.nbytes for kept in self.row_states)

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        if not rows.controller.tries(MODEL):
            return rows.no_draft()
        levels = levels_within(budget, self._depth)
        known = [
            0 if kept is None else min(len(kept), levels) for kept in (self.row_states[row] for row in rows.running)
        ]
        draft = rows.no_draft()
        if any(known):
            tree = Tree.chain(max(known))
            draft = grow(rows, tree, self.reader(rows, tree))
            draft = replace(draft, row_lengths=tuple(min(each, draft.length) for each in known))
        self._alone = {row: levels_within(rows.budget_of(row, budget), self._depth) for row in rows.running}
        self._levels = min(levels, (budget.nodes - draft.length) // (draft.length + 1))
        return replace(draft, behind=self._masks(rows, draft)) if self._levels else draft

    def _masks(self, rows: RowsView, draft: Draft) -> MaskRows:
        block = _with_masks(draft.length, self._levels)
        ends = torch.tensor([[rows.text_length(row)] for row in rows.running])
        places = ends + torch.tensor(block.depths[draft.length :])
        return MaskRows(to_device(mask_ids(places, *self._ids), draft.tokens.device), block, self._lora)

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        some = next(kept for kept in self.row_states if kept is not None)
        guesses = some.new_zeros(len(rows.running), tree.depth, some.shape[-1])
        for place, row in enumerate(rows.running):
            if (kept := self.row_states[row]) is not None:
                guesses[place, : len(kept)] = kept[: tree.depth]
        return lambda tokens, first: guesses[:, first + 1 : first + 2]

    def read_prompt(self, rows: RowsView, counts: Sequence[int], features: Features) -> None:
        """Learn nothing: no mask is read behind a prompt."""

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        guesses = target.behind if isinstance(draft.behind, MaskRows) else None
        for number, (row, chosen) in enumerate(zip(rows.running, committed_places(rows, verdict), strict=True)):
            if not chosen:
                continue
            self.row_states[row] = None
            start, count = chosen[-1] * self._levels, min(self._levels, self._alone.get(row, self._levels))
            if isinstance(guesses, Tensor) and count:
                self.row_states[row] = guesses[number, start : start + count].clone()
