"""All stages, in the order in which they run."""

from __future__ import annotations

from functools import partial

from device.captures import capture_cases
from device.costs import cost_cases
from device.first import first_cases
from device.products import piece_cases
from device.stage import Stage
from device.waits import wait_cases

STAGES = (
    Stage("first", "Whether drafts give the text of plain decoding, and how often a round waits", 2, first_cases),
    Stage("pieces", "Products in fewer bits, attention of blocks, and over lengths that are new", 1, piece_cases),
    Stage("costs-8B", "c, V and o at the shape of Llama-3.1-8B, random weights", 8, partial(cost_cases, "8B")),
    Stage("waits", "How often a round waits for the device, and how long it takes", 3, wait_cases),
    Stage("captures", "How many passes each generation captures, and how long that takes", 2, capture_cases),
    Stage("costs-1B", "c, V and o at the shape of Llama-3.2-1B, random weights", 8, partial(cost_cases, "1B")),
)
