"""The arms of selfspec: plain decoding, and decoding with a draft."""

from __future__ import annotations

from collections import Counter

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.bench.arm import Arm, ArmSpec
from selfspec.bench.cell import Cell
from selfspec.bench.timing import Call, DraftShape, Stopwatch
from selfspec.draft.named import parse_draft
from selfspec.output import Round
from selfspec.verify.stock import bare
from selfspec.wrapped import wrap


class OwnArm(Arm):
    """A wrapped model.

    Args:
        spec: which arm it is; without a draft it decodes plainly.
        model: stock.

    Raises:
        DraftConfigError: the draft is no draft, or does not fit the model.
        UnsupportedOptionError: there is no such acceptance rule.
    """

    def __init__(self, spec: ArmSpec, model: PreTrainedModel) -> None:
        super().__init__(spec)
        drafter = None if spec.draft is None else parse_draft(spec.draft)
        self.wrapped = wrap(bare(model), drafter, draft_length=spec.length, accept=spec.accept)

    def decode(self, prompts: Tensor, cell: Cell, seed: int) -> Call:
        watch = Stopwatch(self.wrapped.model.device)
        generation = self.wrapped.stream(prompts, seed=seed, **cell.options)
        rounds = [next(generation)]
        first_seconds = watch.read()
        rounds += generation
        sequences = generation.output().sequences
        seconds = watch.read()
        rows: list[list[int]] = sequences[:, prompts.shape[1] :].tolist()
        first_tokens = sum(len(row.tokens) for row in rounds[0].rows)
        return Call(rows, seconds, first_seconds, first_tokens, len(rounds), generation.stats, _shapes(rounds))


def _shapes(rounds: list[Round]) -> Counter[DraftShape]:
    return Counter(DraftShape(max(len(row.draft) for row in each.rows), each.steps) for each in rounds)
