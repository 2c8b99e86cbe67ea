"""Train exit heads on a frozen base: they learn its distribution from the states at their exits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.draft.early_exit import ABOUT, FILE, AboutExits, ExitAdapter
from selfspec.files.json_text import write_described
from selfspec.measure.acceptance import Readout
from selfspec.model.early_head import DraftHead
from selfspec.model.identity import fingerprint, vocabulary_size
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import Blocks, Split, most_frequent
from selfspec.tools.train.lesson import ExitMeter, Lesson
from selfspec.tools.train.recipe import ExitHeadRecipe


class ExitHeads(nn.Module):
    """One adapter for each exit. `tokens` are the ids that can be drafted; None: all."""

    tokens: Tensor | None

    def __init__(self, hidden: int, rank: int, exits: Sequence[int], tokens: Tensor | None = None) -> None:
        super().__init__()
        self.hidden, self.rank = hidden, rank
        self.register_buffer("tokens", tokens)
        self.exits = nn.ModuleDict({str(exit_layer): ExitAdapter(hidden, rank) for exit_layer in exits})

    def forward(self, states: dict[int, Tensor]) -> dict[int, Tensor]:
        """Adapt the states `[batch, tokens, hidden]` of each exit."""
        return {exit_layer: self.exits[str(exit_layer)](entering) for exit_layer, entering in states.items()}

    def kept(self, values: Tensor) -> Tensor:
        """Return values `[..., vocab]` of the tokens that can be drafted."""
        return values if self.tokens is None else values.index_select(-1, self.tokens)

    def save(self, folder: Path, dtype: torch.dtype, base: str, default: int, validation: Mapping[str, float]) -> None:
        """Write the file that `ExitHead.from_pretrained` reads."""
        tensors = {
            name: value.to("cpu", dtype if value.is_floating_point() else torch.int32).contiguous()
            for name, value in self.state_dict().items()
        }
        about = AboutExits(3, [int(name) for name in self.exits], default, self.hidden, self.rank, base)
        write_described(folder / FILE, ABOUT, {**asdict(about), "validation": dict(validation)}, tensors)


class ExitLesson(Lesson):
    """Distils the full model into exit heads. The base stays as it is, and with it the output distribution."""

    def __init__(self, base: PreTrainedModel, recipe: ExitHeadRecipe, text: Split, seed: int) -> None:
        self.held_out = text.held_out
        self._adapter = find_adapter(base)
        self._fingerprint = fingerprint(base)
        self._base = base.eval().requires_grad_(False)
        self._exits = recipe.exits_of(len(self._adapter.decoder_layers(base)))
        self._readout = Readout(base, self._adapter)
        tokens = None
        if recipe.vocabulary is not None:
            tokens = most_frequent(text.train.ids, recipe.vocabulary, vocabulary_size(base))
        hidden: int = base.config.get_text_config(decoder=True).hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heads = ExitHeads(hidden, recipe.rank or 2 * hidden, self._exits, tokens)
        self.model: ExitHeads = heads.to(base.device)

    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        states, full = self._read(batch.ids)
        learnt = batch.before_learnt
        p = self.model.kept(full[learnt].softmax(-1))
        loss = torch.zeros((), device=batch.ids.device)
        for adapted in model(states).values():
            log_q = self.model.kept(self._readout.logits(adapted)[learnt].float()).log_softmax(-1)
            # The divergence teaches early on what is far off, and total variation is what a draft is judged by.
            kl, overlap = -(p * log_q).sum(), torch.minimum(p, log_q.exp()).sum()
            loss = loss + 1 + (kl - overlap) / max(len(p), 1)
        return loss / len(self._exits)

    def evaluate(self) -> dict[str, float]:
        heads = {layer: DraftHead(self.model.exits[str(layer)], self.model.tokens) for layer in self._exits}
        meter = ExitMeter(self._base, self._adapter, heads)
        for batch in self.measured():
            states, full = self._read(batch.ids)
            learnt = batch.before_learnt
            for layer, adapted in self.model(states).items():
                draft = self.model.kept(self._readout.logits(adapted)[learnt])
                meter.add(full[learnt], layer, heads[layer].spread(draft, full.shape[-1]))
        return meter.named()

    def save(self, folder: Path, dtype: torch.dtype, figures: Mapping[str, float]) -> None:
        best = max(self._exits, key=lambda exit_layer: figures[f"speedup_{exit_layer}"])
        self.model.save(folder, dtype, self._fingerprint, best, figures)

    @torch.no_grad()
    def _read(self, ids: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """Return the states at the exits, and the full model's logits."""
        # A process of several finds out only now which device is its own.
        self._base.to(ids.device)
        with self._readout.recorded(self._exits) as states:
            full = self._base(input_ids=ids, use_cache=False).logits
        return states, full.float()
