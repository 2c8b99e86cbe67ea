"""Outputs recorded once: whatever is moved, renamed or rewritten inside, the same call gives the same tokens.

Only the public API is used. What is recorded is decided by no clock and no generator: greedy text and the coupled
rule's, with drafts of a fixed length. To record anew, after a change that is meant to change outputs:

    PYTHONPATH=. python tests/test_pinned_outputs.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

import selfspec
from helpers.tiny import in_turns
from selfspec.compat import RENAMED_CACHE

RECORDED = Path(__file__).parent / "data" / "pinned_outputs.json"
VOCABULARY, PAD, ROWS, PROMPT, NEW, DRAFTED = 32, 0, 3, 9, 16, 3
PADDED = (0, 5, 2)
"""Columns of padding to the left of each row's prompt."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
"""Fields of each config beside `SIZES`: grouped queries, learned positions, windows, experts, states, latent keys."""

DRAFTS: dict[str, selfspec.drafts.Drafter] = {
    "exit": selfspec.drafts.EarlyExit(3),
    "skip": selfspec.drafts.LayerSkip(attention=[2], mlp=[3]),
    "look-up": selfspec.drafts.PromptLookup(shortest=1),
    "cascade": selfspec.drafts.Cascade(selfspec.drafts.PromptLookup(shortest=1), selfspec.drafts.EarlyExit(3)),
}
GREEDY: dict[str, Any] = {"do_sample": False}
COUPLED: dict[str, Any] = {"do_sample": True, "accept": "coupled", "seed": 11, "temperature": 0.8, "top_p": 0.9}
PENALTY: dict[str, Any] = {"repetition_penalty": 1.2, "eos_token_id": 7}
SCENARIOS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy, penalty": GREEDY | PENALTY,
    "greedy, memory": GREEDY,
    "coupled": COUPLED,
    "coupled, penalty": COUPLED | PENALTY,
    "coupled, memory": COUPLED,
}


class Cycling(LogitsProcessor):
    """Favours another token with each call, so it has to be called once for each committed token, in order."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        favoured = torch.zeros_like(scores)
        favoured[:, self.calls % VOCABULARY] = 1.0
        return scores + favoured


def tiny_model(model_type: str) -> PreTrainedModel:
    """A random model in fp32, whose last layers change the stream less than the first, so that drafts may agree."""
    config_class = CONFIG_MAPPING[model_type]
    names = getattr(config_class, "attribute_map", {})
    config = config_class(
        **{names.get(name, name): value for name, value in (SIZES | ARCHITECTURES[model_type]).items()}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            layer = re.search(r"\.(\d)\.", name)
            late = layer is not None and int(layer[1]) >= 2
            if weight.ndim == 1:
                # Norms and biases start as ones and zeros; a mistake in them must show too.
                torch.nn.init.normal_(weight, mean=1.0 if name.endswith(("weight", "residual")) else 0.0, std=0.1)
            else:
                torch.nn.init.normal_(weight, std=0.2 if late else 0.3)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    return model.float().eval()


def words(columns: int, seed: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (ROWS, columns), generator=torch.Generator().manual_seed(seed))


def outputs(spec: selfspec.SelfSpeculative, scenario: str) -> list[str]:
    """What each of two turns of a chat gives, the second over the cache of the first: a line of JSON each."""
    ids, past, turns = words(PROMPT, 3), None, []
    mask = torch.stack([torch.arange(PROMPT) >= padded for padded in PADDED]).long()
    ids = ids.where(mask > 0, PAD)
    for turn in range(2):
        out = spec.generate(
            ids,
            mask,
            cache=past,
            logits_processor=LogitsProcessorList([Cycling()] if "memory" in scenario else []),
            draft_length=DRAFTED,
            max_new_tokens=NEW,
            return_dict_in_generate=True,
            **SCENARIOS[scenario],
        )
        stats = out.stats
        found = {
            "tokens": out.sequences[:, ids.shape[1] :].tolist(),
            "rounds": stats.rounds,
            "mean_accepted_length": stats.mean_accepted_length,
            "judged": stats.judged_per_depth,
            "accepted": stats.accepted_per_depth,
        }
        turns.append(json.dumps(found))
        past, ids = out.cache, torch.cat([out.sequences, words(4, 5 + turn)], 1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return turns


def everything(model_type: str, draft: str) -> dict[str, str]:
    """The outputs of every scenario and turn of it, by name."""
    spec = selfspec.wrap(tiny_model(model_type), DRAFTS[draft])
    return {
        f"{model_type}, {draft}, {scenario}, turn {turn}": line
        for scenario in SCENARIOS
        for turn, line in enumerate(outputs(spec, scenario), 1)
    }


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


@pytest.mark.skipif(not RENAMED_CACHE, reason="older transformers make other random models and penalise padding")
@pytest.mark.parametrize(("model_type", "draft"), in_turns(tuple(ARCHITECTURES), tuple(DRAFTS)))
def test_outputs_are_those_that_were_recorded(model_type: str, draft: str) -> None:
    found = everything(model_type, draft)
    known = recorded()
    assert {name: json.loads(line) for name, line in found.items()} == {name: known[name] for name in found}


def record() -> None:
    """Write the outputs of the code as it is, a line for each turn."""
    torch.set_num_threads(1)
    lines = [
        f"{json.dumps(name)}: {line}"
        for model_type in ARCHITECTURES
        for draft in DRAFTS
        for name, line in everything(model_type, draft).items()
    ]
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    record()
