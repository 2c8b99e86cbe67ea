"""Decodes with a model that is larger than the memory it may take; `benchmarks/streaming.py` starts it and looks on.

    python benchmarks/streaming_worker.py ARM FOLDER MEMORY TEMPERATURE TOKENS THREADS CONTEXT

Reads a line of JSON with the `ids` of the prompt, and prints one: the new tokens, the seconds and the bytes from the
disk for each of those after the first round, the plan, and the most resident memory; or why the budget is refused.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import sampling
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria
from transformers.utils import logging

import selfspec
from selfspec.errors import UnsupportedOptionError
from selfspec.model.checkpoint import read_config
from selfspec.placement.drafts import placement_of
from selfspec.placement.place import plan_checkpoint
from selfspec.placement.weight_source import FromDisk
from selfspec.process import status_bytes

_DRAFTS: dict[str, bool | str] = {"drafts": True, "planes": True, "upper": "upper"}


class _Clock(StoppingCriteria):
    """Notes when tokens came, and the bytes that the disk gave until then."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int, int]] = []

    def note(self, tokens: int) -> None:
        self._times.append((time.perf_counter(), _bytes_read(), tokens))

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.note(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def of_a_token(self) -> dict[str, float]:
        """Return seconds and bytes for each token after those of the first round."""
        (first, before, already), (last, after, all_) = self._times[0], self._times[-1]
        return {"seconds": (last - first) / (all_ - already), "bytes": (after - before) / (all_ - already)}


def main() -> None:
    """Decode once."""
    arm, folder, memory, *numbers = sys.argv[1:]
    temperature, tokens, threads, context = float(numbers[0]), *map(int, numbers[1:])
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    plan, given = None, None if memory == "all" else memory
    prompt, clock, stats, moved = torch.tensor([json.loads(sys.stdin.readline())["ids"]]), _Clock(), None, None
    options = {"max_new_tokens": tokens, "eos_token_id": None, **sampling(temperature)}
    try:
        if arm == "accelerate":
            # Planned as plain streaming is.
            plan = plan_checkpoint(folder, memory, None, False, context, FromDisk()).plan
            model = _offloaded(folder, plan.resident)
            text = _by_transformers(model, prompt, clock, options)
        elif arm == "stock":
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            text = _by_transformers(model, prompt, clock, options)
        else:
            draft, room = _DRAFTS.get(arm, False), None if given is None else context
            spec = selfspec.load(folder, given, device="cpu", draft=draft, context=room)
            placement, text, stream = placement_of(spec.model), [], None
            if placement is not None:
                plan, stream = placement.plan, placement.stream
            passes: list[int] = []
            generation = spec.stream(prompt, torch.ones_like(prompt), seed=0, **options)
            for chunk in generation:
                text += chunk.rows[0].tokens
                clock.note(len(text))
                passes.append(0 if stream is None else stream.bytes_moved)
            moved = (passes[-1] - passes[0]) / max(1, len(passes) - 1)
            stats = generation.stats.to_dict()
    except UnsupportedOptionError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    print(
        json.dumps(
            {
                "text": text,
                "plan": plan and asdict(plan) | {"streamed": plan.streamed},
                "stats": stats,
                "moved": moved,
                "peak_bytes": status_bytes("VmHWM"),
                **clock.of_a_token(),
            }
        ),
        flush=True,
    )


def _offloaded(folder: str, resident: int) -> PreTrainedModel:
    """Return the model with the layers after `resident` on the disk, by accelerate."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(read_config(folder))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    for number in range(len(empty.model.layers)):
        places[f"model.layers.{number}"] = "cpu" if number < resident else "disk"
    offload = str(Path(folder) / "offload")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=offload)
    model.eval().register_forward_pre_hook(_without_page_cache(folder))
    return model


def _by_transformers(model: PreTrainedModel, prompt: Tensor, clock: _Clock, options: dict[str, Any]) -> list[int]:
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, pad_token_id=0, stopping_criteria=[clock], **options)
    text: list[int] = out[0, prompt.shape[1] :].tolist()
    return text


def _without_page_cache(folder: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Let the system forget the files before each pass, which memory would hold otherwise and the budget would not."""

    def forget(_: nn.Module, __: tuple[Any, ...]) -> None:
        for file in Path(folder).rglob("*"):
            if file.is_file():
                opened = os.open(file, os.O_RDONLY)
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(opened)

    return forget


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


if __name__ == "__main__":
    main()
