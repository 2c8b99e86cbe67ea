"""Train a LoRA of mask rows: masks behind every token of a text guess, all at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import DynamicCache, PreTrainedModel

from selfspec.draft.heads.uno import BOUND, DEPTH, PREFIX, check_whole_passes, mask_ids
from selfspec.model.gated_view import GatedModel
from selfspec.model.identity import vocabulary_size
from selfspec.model.layer_path import LayerPath, Lora, LoraRows
from selfspec.model.registry import find_adapter
from selfspec.model.stock_passes import over_cache
from selfspec.tools.train.corpus import Split
from selfspec.tools.train.heads.lesson import DraftHeadModule, HeadLesson, Seen
from selfspec.tools.train.recipe import HeadRecipe


class UnoModule(DraftHeadModule):
    """Additions of `rank`, begun from a seed, to all linear layers of a base, which stays as it is."""

    def __init__(self, base: PreTrainedModel, rank: int, seed: int) -> None:
        super().__init__()
        adapter = find_adapter(base)
        prefix = ".".join(adapter.path(base)) + "."
        linears = {name: each for name, each in base.named_modules() if type(each) is nn.Linear}
        self._names = [name for name in linears if name.startswith(prefix)]
        self.down = nn.ModuleList(nn.Linear(linears[name].in_features, rank, False) for name in self._names)
        self.up = nn.ModuleList(nn.Linear(rank, linears[name].out_features, False) for name in self._names)
        drawn = torch.Generator().manual_seed(seed)
        for down, up in zip(self.down, self.up, strict=True):
            nn.init.kaiming_uniform_(down.get_parameter("weight"), 5**0.5, generator=drawn)
            # At first a mask says what the target says of it.
            nn.init.zeros_(up.get_parameter("weight"))
        lora = Lora(*(dict(zip(self._names, layers, strict=True)) for layers in (self.down, self.up)))
        path = LayerPath(len(adapter.decoder_layers(base)), lora=LoraRows(lora, 0))
        inside = adapter.base(base)
        masked = GatedModel(base, adapter, path).module.get_submodule(inside)
        # In a tuple they are none of the weights that learn.
        self._base = base, base.get_submodule(inside), masked
        self._bound = vocabulary_size(base)

    def forward(self, seen: Seen, steps: int) -> list[Tensor]:
        base, inside, masked = self._base
        rows, width = seen.ids.shape
        cache = DynamicCache()
        with torch.no_grad():
            inside(input_ids=seen.ids, **over_cache(base, cache))
        ends = torch.arange(width, device=seen.ids.device).repeat_interleave(steps)
        levels = torch.arange(steps, device=ends.device).repeat(width)
        places = (ends + levels + 1)[None]
        ids = mask_ids(places + 1, 1, self._bound).expand(rows, -1)
        if self.training:
            ids = torch.randint_like(ids, 1, self._bound)
        # Each sees the text up to the token that it is behind, and the masks between.
        text = torch.arange(width, device=ends.device) <= ends[:, None]
        between = (ends[:, None] == ends) & (levels <= levels[:, None])
        hides = torch.zeros(len(ends), width + len(ends), dtype=base.dtype, device=ends.device)
        hides.masked_fill_(~torch.cat([text, between], 1), torch.finfo(base.dtype).min)
        found = masked(input_ids=ids, attention_mask=hides[None, None], position_ids=places, **over_cache(base, cache))[
            0
        ].unflatten(1, (width, steps))
        output = base.get_output_embeddings()
        # Of the pair that `step` tokens were drafted before, the mask that many behind the token before these.
        guesses = (pad(found[:, :, step], (0, 0, step, 0))[:, :width][seen.reached(step)] for step in range(steps))
        return [linear(each.to(output.weight.dtype), output.weight, output.bias) for each in guesses]

    def weights(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for name, down, up in zip(self._names, self.down, self.up, strict=True):
            named[f"{PREFIX}{name}.lora_A.weight"] = down.get_parameter("weight")
            named[f"{PREFIX}{name}.lora_B.weight"] = up.get_parameter("weight")
        return named


class UnoLesson(HeadLesson):
    """Trains a LoRA for `depth` masks behind a token, in the layout of `peft`."""

    model: UnoModule
    files = "adapter_model.safetensors", "adapter_config.json"

    def __init__(self, base: PreTrainedModel, recipe: HeadRecipe, text: Split, seed: int) -> None:
        super().__init__(base, recipe, text, ())
        # What it adds is in float32, and only the trainer casts.
        self.model = UnoModule(base.float() if base.dtype.itemsize < 4 else base, recipe.rank, seed).to(base.device)

    @classmethod
    def check(cls, base: PreTrainedModel) -> None:
        adapter = find_adapter(base)
        adapter.check_trees(base)
        for name, _ in base.named_modules():
            check_whole_passes(name, adapter)

    def config(self) -> dict[str, Any]:
        rank = self._recipe.rank
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base.name_or_path,
            "r": rank,
            "lora_alpha": rank,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in self.model._names}),
            BOUND: vocabulary_size(self._base),
            DEPTH: self._recipe.depth,
        }
