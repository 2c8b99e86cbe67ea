"""How much work a calibration is, by its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from selfspec.measure.expected_time import Size, Work
from selfspec.tools.calibrate.measurements import Measurements

_USUAL = Measurements()
SIZES = {
    "max_new_tokens": Size(_USUAL.max_new_tokens, 16),
    "repeats": Size(_USUAL.repeats, 1),
    "longest_draft": Size(_USUAL.longest_draft, 4),
}
# Greedily and sampling. Candidates that are confirmed, with trees and without; what a token of one takes.
_KINDS, _CANDIDATES, _CHAINS, _A_TOKEN = 2, 9, 5, 0.8
# Drafts whose costs are measured, rounds of that, and larger batches, most of which cost what their rows do.
_MEASURED, _ROUNDS, _BATCHES = 6, 11, 20
_WARM_UPS, _GO_ON = 2, 4


def work(asked: Measurements, prompts: Sequence[Tensor], drafts: int, sizes: Mapping[str, int]) -> Work:
    """Count the tokens of calibrating on prompts, each `[1, prompt]`, where so many paths are considered."""
    new, repeats, longest = (
        sizes.get(name, getattr(asked, name)) for name in ("max_new_tokens", "repeats", "longest_draft")
    )
    prompt, number = sum(each.shape[1] for each in prompts), len(prompts)
    # All exits are read off one pass; the others, some in fewer bits, take one each.
    texts = Work(new * number, prompt + (prompt + new * number) * (2 + drafts))
    arms = 1 + (_CANDIDATES if asked.nodes else _CHAINS)
    turns = arms * (_WARM_UPS + 1) + (repeats - 1) * _GO_ON
    confirmed = Work(new * _A_TOKEN * number * turns, prompt * turns).times(asked.batch**0.5)
    # Of a round: target passes of each width, and of each draft two lengths, with their verification.
    jobs = longest + 1 + min(drafts, _MEASURED) * (3 + 1 + min(4, longest))
    costs = Work(jobs * _ROUNDS, jobs * _BATCHES)
    return (texts + confirmed).times(_KINDS) + costs
