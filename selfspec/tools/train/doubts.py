"""What of a training's figures looks wrong, while it runs and in the end, and what its result is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.measure.estimate import Estimate

# Nats a token that the full model may lose before it is said, and before it is called ruined; a rise of the loss.
_LOST, _RUINED, _RISEN = 0.05, 0.3, 1.15
# Norms of gradients, which are clipped to 1: of SmolLM2 135M 33 to 89 where it learnt, and 195 where it was ruined.
_STEEP = 150.0


@dataclass(frozen=True)
class CheckedExit:
    """An exit of a trained checkpoint or side-car, in times plain decoding.

    Attributes:
        draft: its name.
        predicted: from its acceptance rate on held-out text and the weights that it reads.
        greedy: measured, greedily.
        sampled: measured, at temperature 0.8.
    """

    draft: str
    predicted: float
    greedy: Estimate
    sampled: Estimate


def doubts(before: Mapping[str, float], log: Sequence[Mapping[str, float]]) -> list[str]:
    """Return what looks wrong so far, a sentence each.

    Args:
        before: figures on held-out text before the training.
        log: losses, norms of gradients and figures on held-out text, in order.
    """
    found = []
    losses = [point["loss"] for point in log if "loss" in point]
    if losses and losses[-1] > _RISEN * min(losses):
        found.append(f"the loss rose from {min(losses):.2f} to {losses[-1]:.2f}; lower --learning-rate")
    steepest = max((point["grad_norm"] for point in log if "grad_norm" in point), default=0.0)
    if steepest > _STEEP:
        found.append(
            f"the gradient's norm reached {steepest:.0f}, far above the 1 it is clipped to; lower --learning-rate, "
            "or give larger batches"
        )
    held_out, own = [point["held_out_loss"] for point in log if "held_out_loss" in point], before.get("held_out_loss")
    if own is not None and held_out and held_out[-1] > own + _RUINED:
        found.append(
            f"the full model's loss on held-out text rose from {own:.2f} to {held_out[-1]:.2f}: it forgets; lower "
            "--learning-rate"
        )
    return found


def verdict(
    checked: Sequence[CheckedExit], folder: Path, before: Mapping[str, float], after: Mapping[str, float]
) -> str:
    """Say what a training made, and what to do with it.

    Args:
        checked: its exits.
        folder: where it is.
        before: figures on held-out text before the training.
        after: the same of the result.
    """
    own, now = before.get("held_out_loss"), after.get("held_out_loss")
    cost = 0.0 if own is None or now is None else now - own
    if cost > _RUINED:
        return (
            f"The training ruined the full model: its loss on held-out text is {now:.2f}, {cost:.2f} nats a token "
            f"above the base's, {math.exp(cost):.1f} times its perplexity. Do not use it; lower --learning-rate"
        )
    lost = f" The full model lost {cost:.2f} nats a token on held-out text." if cost > _LOST else ""
    best = max(checked, key=lambda each: each.sampled.value)
    said = f"greedy {best.greedy.shown(2)}, sampled {best.sampled.shown(2)}, predicted {best.predicted:.2f}"
    # A single turn says nothing of how sure it is.
    if not any(each.low > 1 and each.confidence for each in (best.greedy, best.sampled)):
        return (
            f"No exit surely beat plain decoding here; the best is {best.draft}: {said}. Train for longer or on more "
            f"text, or draft without training: --draft lookup+int8.{lost}"
        )
    with_head = f"MODEL --draft {best.draft}" if best.draft.startswith("head:") else str(folder)
    return (
        f"{best.draft} in times plain decoding: {said}. Choose by your own texts: selfspec calibrate {with_head} "
        f"--prompt-file FILE.{lost}"
    )
