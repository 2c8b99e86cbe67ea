"""The arms of selfspec: plain decoding, and decoding with a draft."""

from __future__ import annotations

from collections import Counter

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.api import wrap
from selfspec.control.draft_policy import DraftPolicy
from selfspec.decode.output import Round
from selfspec.draft import Drafter
from selfspec.measure.stock import bare
from selfspec.measure.timing import Call, DraftShape, Stopwatch
from selfspec.runtime.named import runtime_named
from selfspec.tools.bench.arm import Arm, ArmSpec
from selfspec.tools.bench.cell import Cell


class OwnArm(Arm):
    """A wrapped model.

    Args:
        spec: which arm it is; without a draft it decodes plainly.
        model: stock.

    Raises:
        DraftConfigError: the draft is no draft, or does not fit the model.
        ProfileError: it is `auto`, and no calibration fits.
        UnsupportedOptionError: there is no such acceptance rule, or the runtime cannot run where the model is.
    """

    def __init__(self, spec: ArmSpec, model: PreTrainedModel) -> None:
        super().__init__(spec)
        self.wrapped = wrap(
            bare(model),
            spec.draft,
            draft_length=spec.length,
            accept=spec.accept,
            runtime=runtime_named(spec.runtime),
        )

    def drafter(self, cell: Cell) -> Drafter | None:
        """What drafts under the conditions of a cell."""
        draft = self.wrapped.draft
        return (
            draft.choose_draft(greedy=not cell.sampled).in_batch(cell.batch).draft
            if isinstance(draft, DraftPolicy)
            else draft
        )

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
