"""Train tiny mixtures of experts, of the shapes of Mixtral, Qwen2-MoE and DeepSeek-V3, to measure drafts on.

    python benchmarks/mixtures.py --texts pycode.jsonl.gz --to MIXTURES --steps 600
    python benchmarks/acceptance.py MIXTURES/* --draft experts:1 --draft experts:1+int8 --draft int8 \\
        --texts 'heldout.jsonl#kind=code' --name acceptance_mixtures

They have the demo's tokenizer. What their experts share is what training on so few tokens makes of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from selfspec.measure.embedded import model_place

_SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "output_router_logits": True,
}
# Eight experts each, two of which read a token; the last two have an expert that reads all.
_SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 384, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        "intermediate_size": 384,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 192,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "intermediate_size": 512,
        "moe_intermediate_size": 384,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 6,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "output_router_logits": False,
    },
}
_WIDTH = 256


def main() -> None:
    """Train each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", required=True, type=Path, help="JSON lines with a text each")
    parser.add_argument("--to", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=600, help="of 8 pieces of 256 tokens")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(model_place("demo"))
    texts = load_dataset("json", data_files=str(options.texts), split="train").shuffle(seed=0)
    pieces = _pieces(texts, tokenizer, 8 * options.steps)
    for family, sizes in _SHAPES.items():
        folder = options.to / family
        torch.manual_seed(0)
        special = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **{**_SIZES, **sizes, **special})
        model = AutoModelForCausalLM.from_config(config)
        arguments = TrainingArguments(
            str(folder / "trainer"),
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            warmup_steps=options.steps // 20,
            lr_scheduler_type="cosine",
            logging_steps=max(options.steps // 10, 1),
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=0,
        )
        Trainer(model, arguments, train_dataset=pieces, data_collator=default_data_collator).train()
        # Needed by the loss alone.
        model.config.output_router_logits = False
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _pieces(texts: Dataset, tokenizer: Any, number: int) -> Dataset:
    """Cut texts into pieces of `_WIDTH` tokens, one behind the other."""
    found: list[dict[str, list[int]]] = []
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text["text"])["input_ids"]
        while len(ids) >= _WIDTH:
            piece, ids = ids[:_WIDTH], ids[_WIDTH:]
            found.append({"input_ids": piece, "labels": piece})
        if len(found) >= number:
            break
    return Dataset.from_list(found[:number])


if __name__ == "__main__":
    main()
