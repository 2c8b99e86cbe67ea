"""All stages, in the order in which they run."""

from __future__ import annotations

from functools import partial

from device.costs import cost_cases
from device.gpu_tests import test_cases
from device.memory import memory_cases
from device.products import piece_cases
from device.speed import speed_cases, tree_cases
from device.stage import Stage
from device.streaming import streaming_cases
from device.verification import verification_cases
from device.waits import wait_cases

STAGES = (
    Stage("tests", "The tests that need a device, `pytest -m gpu`", 5, test_cases),
    Stage("pieces", "Products in fewer bits, and attention over lengths that are new", 1, piece_cases),
    Stage("verify", "`selfspec verify` in bfloat16: whether tokens are the model's own", 5, verification_cases),
    Stage("waits", "How often a round waits for the device, and how busy it is", 3, wait_cases),
    Stage("costs-1B", "c, V and o at the shape of Llama-3.2-1B, random weights", 8, partial(cost_cases, "1B")),
    Stage("speed-1B", "Tokens a second of a trained model widened to 1B", 8, partial(speed_cases, "1B")),
    Stage("trees-1B", "Trees of 16 to 64 nodes beside chains, widened to 1B", 6, partial(tree_cases, "1B")),
    Stage("costs-8B", "c, V and o at the shape of Llama-3.1-8B, random weights", 8, partial(cost_cases, "8B")),
    Stage("speed-8B", "Tokens a second of a trained model widened to 8B", 8, partial(speed_cases, "8B")),
    Stage("trees-8B", "Trees of 16 to 64 nodes beside chains, widened to 8B", 8, partial(tree_cases, "8B")),
    Stage("streaming-8B", "More model than memory: a trained model widened to 8B in 8 GB", 8, streaming_cases),
    Stage("memory", "Memory at the peak, of both shapes", 5, memory_cases),
)
