"""How much work a verification is, by its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from selfspec.measure.expected_time import Size, Work
from selfspec.measure.rounding import widths_of
from selfspec.tools.verify.place import NEW_TOKENS
from selfspec.tools.verify.settings import Settings

SIZES = {
    "max_new_tokens": Size(Settings().max_new_tokens, 16),
    "samples": Size(Settings().samples, 100),
}
# A drafted token in plain ones, draft steps included; what a sampled token is read for, drafts and verification.
_DRAFTED, _SAMPLED = 1.5, 3.0
# Prefixes that places are looked for among, and tokens read of each.
_PLACES, _OF_A_PLACE = 96, 12


def work(settings: Settings, prompts: Sequence[Tensor], drafts: int, sizes: Mapping[str, int]) -> Work:
    """Count the tokens of verifying some drafts on prompts, each `[1, prompt]`."""
    new, samples = (sizes.get(name, getattr(settings, name)) for name in ("max_new_tokens", "samples"))
    prompt = sum(each.shape[1] for each in prompts)
    # The reference: written, read token by token, and in blocks of each width.
    steps = new * (2 + sum(1 / width for width in widths_of(settings.draft_length)))
    # Each draft writes by each rule and reads the text, and plain decoding beside them.
    steps += new * _DRAFTED * (1 + drafts) * (1 + len(settings.greedy_rules))
    texts = Work(steps * len(prompts), prompt * (4 + 2 * (1 + drafts)))
    coupled = Work(new * _DRAFTED, (prompt + new * len(prompts)) * _DRAFTED)
    coupled = coupled.times(len(settings.coupled_rules) * (1 + drafts))
    places = Work(read=(prompt + new * len(prompts)) * _OF_A_PLACE + 2 * _PLACES * _OF_A_PLACE)
    fits = drafts * len(settings.sampled_rules) + len(settings.coupled_rules)
    return texts + coupled + places + Work(read=fits * samples * NEW_TOKENS * _SAMPLED)
