"""The lesson of all draft heads: the target's own distribution, for several tokens in a row, from its states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.files.writing import write_json
from selfspec.measure.acceptance import Acceptance, Readout
from selfspec.model.gated_view import FeatureTap, Point
from selfspec.model.identity import vocabulary_size
from selfspec.model.registry import find_adapter
from selfspec.tools.train.corpus import Blocks, Split, most_frequent
from selfspec.tools.train.lesson import Lesson
from selfspec.tools.train.recipe import HeadRecipe

# How much less each further token weighs in the loss than the one before it, which must be right first.
_WEIGHT = 0.8
# Bytes of the target's states that are kept for the next epoch.
_MOST_REMEMBERED = 2**31


@dataclass(frozen=True)
class Seen:
    """A target's pass over a batch of `[rows, tokens + 1]`, at the pairs of a token and the one after it.

    Attributes:
        ids: all tokens but the last, `[rows, tokens]`.
        features: states of these, `[rows, tokens, hidden]`, in the order of the points.
        embedded: the embeddings of the tokens after them, the same shape.
        learnt: whether the distribution after a pair is to be learnt, `[rows, tokens]`.
    """

    ids: Tensor
    features: Sequence[Tensor]
    embedded: Tensor
    learnt: Tensor

    def reached(self, step: int) -> Tensor:
        """Return the learnt pairs at which a draft after `step` drafted tokens may end, `[rows, tokens]`."""
        reached = self.learnt.clone()
        reached[:, :step] = False
        return reached


class DraftHeadModule(nn.Module):
    """A draft head in training."""

    @abstractmethod
    def forward(self, seen: Seen, steps: int) -> list[Tensor]:
        """Draft at all pairs at once; return, by step, the logits at the pairs it has reached, `[pairs, ids]`."""

    def taught(self, step: int, depth: int) -> int:
        """Return how many of `depth` tokens in a row an optimiser step teaches; here all."""
        return depth

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the weights by the names that they are published under."""


class HeadLesson(Lesson):
    """Distils a target, in the dtype of its passes, into a draft head that reads states at `points`."""

    model: DraftHeadModule
    files = "model.safetensors", "config.json"
    """Files of its weights and their configuration."""

    def __init__(self, base: PreTrainedModel, recipe: HeadRecipe, text: Split, points: Sequence[Point]) -> None:
        self.held_out = text.held_out
        self._base = base.eval().requires_grad_(False)
        self._adapter = find_adapter(base)
        self._points = points
        self._recipe = recipe
        self._readout = Readout(base, self._adapter)
        # Texts come again in every epoch, and the target's states of them are as they were.
        self._remembered: dict[bytes, Tensor] = {}
        self._tokens: Tensor | None = None
        if recipe.vocabulary is not None:
            self._tokens = most_frequent(text.train.ids, recipe.vocabulary, vocabulary_size(base)).to(base.device)

    @classmethod
    def check(cls, base: PreTrainedModel) -> None:
        """Refuse, before any pass, a base that this kind of head is not trained for: a HeadError or TrainingError."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the head's configuration."""

    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        seen, wanted = self._read(batch)
        p = self._kept(wanted.float().softmax(-1))
        places = seen.learnt.nonzero()[:, 1]
        loss, weights = torch.zeros((), device=p.device), 0.0
        for number, logits in enumerate(model(seen, self.model.taught(step, self._recipe.depth))):
            q, weight = logits.float().log_softmax(-1), _WEIGHT**number
            loss = loss - weight * (p[places >= number] * q).sum() / max(len(q), 1)
            weights += weight
        return loss / weights

    def evaluate(self) -> dict[str, float]:
        steps = self._recipe.depth
        figures = [Acceptance() for _ in range(steps)]
        accepted = begun = 0
        for batch in self.measured():
            seen, wanted = self._read(batch)
            places = seen.learnt.nonzero()[:, 1]
            right = torch.zeros(steps, *seen.learnt.shape, dtype=torch.bool)
            for number, logits in enumerate(self.model(seen, steps)):
                full, drafted = wanted[places >= number], self._spread(logits, wanted.shape[-1])
                figures[number].add(full, drafted)
                right[number][seen.reached(number).cpu()] = (full.argmax(-1) == drafted.argmax(-1)).cpu()
            # A draft that begins at a pair has its step k at the k-th pair behind it.
            alive = seen.learnt.cpu()[:, : max(seen.learnt.shape[1] - steps + 1, 0)]
            begun += int(alive.sum())
            for number in range(steps):
                alive = alive & right[number][:, number : number + alive.shape[1]]
                accepted += int(alive.sum())
        named = {f"agreement_{number + 1}": each.agreement for number, each in enumerate(figures)}
        named |= {f"alpha_{number + 1}": each.alpha for number, each in enumerate(figures)}
        return {**named, "accepted_greedily": accepted / max(begun, 1)}

    def save(self, folder: Path, dtype: torch.dtype, figures: Mapping[str, float]) -> None:
        content = {
            name: weight.detach().to("cpu", dtype if weight.is_floating_point() else weight.dtype).contiguous()
            for name, weight in self.model.weights().items()
        }
        weights, config = self.files
        save_file(content, folder / weights, {"format": "pt"})
        write_json(folder / config, {**self.config(), "validation": dict(figures)})

    @torch.no_grad()
    def _read(self, batch: Blocks) -> tuple[Seen, Tensor]:
        """Return what a pass of the target shows, and its logits after the learnt pairs, `[pairs, vocab]`."""
        # A process of several finds out only now which device is its own.
        self._base.to(batch.ids.device)
        states = self._states(batch.ids)
        learnt = batch.before_learnt[:, 1:]
        embedded, dtype = self._base.get_input_embeddings()(batch.ids[:, 1:]), next(self.model.parameters()).dtype
        features = [states[:, :-1, place].to(dtype) for place in range(len(self._points))]
        wanted = self._readout.logits(states[:, 1:, -1][learnt][None])[0]
        return Seen(batch.ids[:, :-1], features, embedded.to(dtype), learnt), wanted

    def _states(self, ids: Tensor) -> Tensor:
        """Return the target's states at the points and after the last layer, `[rows, tokens, points + 1, hidden]`."""
        keys = [row.numpy().tobytes() for row in ids.cpu()]
        new = [place for place, key in enumerate(keys) if key not in self._remembered]
        found = {key: self._remembered[key] for key in keys if key in self._remembered}
        if new:
            inside = self._adapter.base(self._base)
            tap = FeatureTap(self._base, self._adapter, inside, [*dict.fromkeys([*self._points, "last"])])
            tap.module.get_submodule(inside)(input_ids=ids[new], use_cache=False)
            taken = tap.take()
            rows = torch.stack([taken[point] for point in (*self._points, "last")], 2)
            found |= zip([keys[place] for place in new], rows, strict=True)
            if (len(self._remembered) + len(new)) * rows[0].nbytes <= _MOST_REMEMBERED:
                self._remembered |= {keys[place]: found[keys[place]] for place in new}
        return torch.stack([found[key] for key in keys])

    def _kept(self, values: Tensor) -> Tensor:
        return values if self._tokens is None else values.index_select(-1, self._tokens.to(values.device))

    def _spread(self, logits: Tensor, size: int) -> Tensor:
        if self._tokens is None:
            return logits
        spread = logits.new_full((len(logits), size), -torch.inf)
        return spread.index_copy_(-1, self._tokens.to(logits.device), logits)
