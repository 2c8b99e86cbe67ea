"""Lessons: a loss for each batch, figures on held-out text, and how the result is saved; here those of exits.

A model learns to be left early by layer dropout and losses of its exits; or heads of its exits learn its distribution
from the states there, and it stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.control.costs import Costs, forecast
from selfspec.draft import EarlyExit
from selfspec.draft.early_exit import ABOUT, FILE, AboutExits, ExitAdapter
from selfspec.files.json_text import write_described
from selfspec.measure.checkpoint import Checkpoint
from selfspec.measure.teacher_forced import Readout
from selfspec.model.early_head import DraftHead
from selfspec.model.identity import fingerprint, vocabulary_size
from selfspec.model.registry import find_adapter
from selfspec.model.sizes import share_read
from selfspec.tools.train.corpus import Blocks, Split, most_frequent
from selfspec.tools.train.recipe import ExitHeadRecipe, LayerSkipRecipe

# Blocks of held-out text read at once.
_BATCH = 4


class Lesson(ABC):
    """A lesson; `model` is trained, and its weights alone are in checkpoints; `held_out` is text to measure on."""

    model: nn.Module
    held_out: Blocks

    @abstractmethod
    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        """Return the loss of one batch after `step` of `steps` steps; `model` is `self.model`, perhaps wrapped."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return the figures on the held-out text, by name."""

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype, figures: Mapping[str, float]) -> None:
        """Write the result, whose figures on the held-out text are known, into a folder that exists."""

    def measure(self) -> dict[str, float]:
        """Evaluate without gradients, in evaluation mode."""
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            figures = self.evaluate()
        self.model.train(training)
        return figures

    def measured(self) -> Iterator[Blocks]:
        """Yield the held-out text in batches, on the model's device."""
        return self.held_out.batches(_BATCH, next(self.model.parameters()).device)


# Logits compared at a time: 64 MiB in float32.
_VALUES = 2**24


@dataclass
class Acceptance:
    """Sums over positions: where target and draft have one likeliest token, and of 1 - TV(p, q) at temperature 1."""

    positions: int = 0
    agreed: float = 0.0
    overlap: float = 0.0

    def add(self, full: Tensor, draft: Tensor) -> None:
        """Count some positions, by logits `[positions, vocab]`; the draft's are -inf where it has no such token."""
        self.positions += full.shape[0]
        self.agreed += float((full.argmax(-1) == draft.argmax(-1)).sum())
        for logits in zip(*(each.split(max(1, _VALUES // full.shape[-1])) for each in (full, draft)), strict=True):
            p, q = (each.float().softmax(-1) for each in logits)
            self.overlap += float(torch.minimum(p, q).sum())

    @property
    def agreement(self) -> float:
        """Share of the positions where both have one likeliest token."""
        return self.agreed / self.positions

    @property
    def alpha(self) -> float:
        """Acceptance rate at temperature 1, the mean of 1 - TV(p, q) (Leviathan et al., 2023)."""
        return self.overlap / self.positions


def _of_exits(
    base: PreTrainedModel, adapter: Adapter, counted: Mapping[int, Acceptance], heads: Mapping[int, DraftHead | None]
) -> dict[str, float]:
    """Return figures by name and exit; speed-ups are predicted from the weights that a draft step reads."""
    named, depth = {}, len(adapter.decoder_layers(base))
    for exit_layer, each in counted.items():
        named[f"agreement_{exit_layer}"] = each.agreement
        named[f"alpha_{exit_layer}"] = each.alpha
        costs = Costs(share_read(base, adapter, EarlyExit(exit_layer).path(depth), heads[exit_layer]))
        named[f"speedup_{exit_layer}"] = forecast(each.alpha, costs).speedup
    return named


_UNLEARNT = -100


class LayerSkipLesson(Lesson):
    """Continues a causal LM on text by the LayerSkip recipe (Elhoushi et al., 2024); its weights change."""

    def __init__(self, base: Checkpoint, recipe: LayerSkipRecipe, held_out: Blocks) -> None:
        # Loaded to decode, weights ask for no gradient.
        self.model: PreTrainedModel = base.model.requires_grad_(True)
        self._tokenizer = base.tokenizer
        self._adapter = find_adapter(base.model)
        self._layers = self._adapter.decoder_layers(base.model)
        self._readout = Readout(base.model, self._adapter)
        self._recipe = recipe
        self._exits = recipe.exits_of(len(self._layers))
        self.held_out = held_out

    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        recipe, depth = self._recipe, len(self._layers)
        active = recipe.active(depth, step, steps)
        rates = recipe.dropout_rates(depth)
        with self._readout.recorded(active) as states, layer_dropout(self._layers, rates):
            full = model(input_ids=batch.ids, use_cache=False).logits
        *shares, share = recipe.weights(depth, active)
        loss = share * _against_text(full, batch)
        teacher = full.detach().float().softmax(-1) if recipe.exit_target == "model" else None
        for exit_layer, weight in zip(active, shares, strict=True):
            logits = self._readout.logits(states[exit_layer])
            loss = loss + weight * (
                _against_text(logits, batch) if teacher is None else _against(logits, teacher, batch)
            )
        return loss

    def evaluate(self) -> dict[str, float]:
        counted = {exit_layer: Acceptance() for exit_layer in self._exits}
        loss, count = 0.0, 0
        for batch in self.measured():
            learnt, tokens = batch.before_learnt, int(batch.learnt[:, 1:].sum())
            with self._readout.recorded(self._exits) as states:
                full = self.model(input_ids=batch.ids, use_cache=False).logits
            loss, count = loss + float(_against_text(full, batch)) * tokens, count + tokens
            for exit_layer in self._exits:
                counted[exit_layer].add(full[learnt], self._readout.logits(states[exit_layer])[learnt])
        of_exits = _of_exits(self.model, self._adapter, counted, dict.fromkeys(self._exits))
        return {"held_out_loss": loss / max(count, 1), **of_exits}

    def save(self, folder: Path, dtype: torch.dtype, figures: Mapping[str, float]) -> None:
        self.model.to(dtype).save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


@contextmanager
def layer_dropout(layers: Sequence[nn.Module], rates: Sequence[float]) -> Iterator[None]:
    """Let each sample skip each layer at its rate inside the `with` block, drawn from torch's default generator."""

    def drop(rate: float, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entered: Tensor = args[0] if args else kwargs["hidden_states"]
        # Drawn on the CPU, so that the same seed drops the same on any device.
        keeps = (torch.rand(entered.shape[0], 1, 1) >= rate).to(entered.device)
        if isinstance(output, tuple):
            return torch.where(keeps, output[0], entered), *output[1:]
        return torch.where(keeps, output, entered)

    with ExitStack() as hooks:
        for layer, rate in zip(layers, rates, strict=True):
            if rate > 0:
                hooks.callback(layer.register_forward_hook(partial(drop, rate), with_kwargs=True).remove)
        yield


def _against_text(logits: Tensor, batch: Blocks) -> Tensor:
    """Return the mean cross-entropy of the next token where it is learnt, in nats a token; 0 where none is."""
    wanted = batch.ids[:, 1:].masked_fill(~batch.learnt[:, 1:], _UNLEARNT)
    total = functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), wanted.flatten(), ignore_index=_UNLEARNT, reduction="sum"
    )
    return total / (wanted != _UNLEARNT).sum().clamp(min=1)


def _against(logits: Tensor, teacher: Tensor, batch: Blocks) -> Tensor:
    """Return the mean cross-entropy against distributions, `[batch, tokens, vocab]`, where learnt."""
    learnt = batch.before_learnt
    total = -(teacher[learnt] * logits[learnt].float().log_softmax(-1)).sum()
    return total / learnt.sum().clamp(min=1)


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
        counted = {layer: Acceptance() for layer in self._exits}
        for batch in self.measured():
            states, full = self._read(batch.ids)
            learnt = batch.before_learnt
            for layer, adapted in self.model(states).items():
                draft = self.model.kept(self._readout.logits(adapted)[learnt])
                counted[layer].add(full[learnt], heads[layer].spread(draft, full.shape[-1]))
        return _of_exits(self._base, self._adapter, counted, heads)

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
