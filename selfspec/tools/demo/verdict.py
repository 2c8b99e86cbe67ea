"""Whether drafting paid, in one sentence, and why not where it did not."""

from __future__ import annotations

from selfspec.tools.demo.comparison import Comparison, Total

# Below it a draft is mostly wasted.
_LOW_ACCEPTANCE = 0.6


def verdict(comparison: Comparison, parameters: int) -> str:
    """Say whether drafting paid on this machine.

    Drafting pays where a round commits more tokens than it costs in steps of plain decoding.

    Args:
        comparison: what was measured.
        parameters: of the model.
    """
    plain, drafting = comparison.fastest_plain, comparison.drafting
    speedup = comparison.speedup
    if min(drafting.tokens_per_second) > max(plain.tokens_per_second):
        return f"Drafting paid on this machine: {speedup:.2f} times the speed of {plain.name}."
    if speedup > 1:
        return (
            f"Drafting made no clear difference on this machine: {speedup:.2f} times the speed of {plain.name} at the "
            "median, but the ranges of the repeats overlap."
        )
    total = Total.of(drafting.stats)
    round_cost = total.mean_accepted_length / speedup
    step_cost = round_cost * total.draft_share / total.mean_draft_length
    rest = round_cost * (1 - total.draft_share)
    untrained = (
        f", and its layers were not trained to be left out (acceptance rate {total.acceptance_rate:.2f})"
        if total.acceptance_rate is not None and total.acceptance_rate < _LOW_ACCEPTANCE
        else ""
    )
    return (
        f"Drafting did not pay on this machine, it ran at {speedup:.2f} times the speed of {plain.name}: a round "
        f"commits {total.mean_accepted_length:.2f} tokens but costs as much as {round_cost:.2f} plain steps "
        f"({total.mean_draft_length:.1f} draft steps at {step_cost:.2f} each, {rest:.2f} for the rest), because in a "
        f"model of {parameters / 1e6:.2f}M parameters a step is mostly Python's overhead for each layer, which the "
        f"draft saves little of{untrained}."
    )
