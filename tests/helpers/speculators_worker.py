"""Runs an EAGLE-3 head as the speculators library loads it. Started by a test, in a Python that has this library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel


@torch.no_grad()
def main(folder: Path, given: Path, answer: Path) -> None:
    """Read a head and what it is given; write which weights differ from its file, and the logits of each step."""
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()
    inputs, weights, own = load_file(given), load_file(folder / "model.safetensors"), model.state_dict()
    model.embed_tokens.load_state_dict({"weight": inputs.pop("embedding")})
    differ = [name for name in weights if name not in own or not torch.equal(own[name], weights[name].to(own[name]))]
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    documents = torch.zeros_like(inputs["input_ids"])
    model(**inputs, document_ids=documents, ttt_steps=3)
    save_file({f"step_{number}": each for number, each in enumerate(logits)}, answer)
    print(json.dumps({"differ": differ, "lacking": sorted({*own} - {*weights})}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
