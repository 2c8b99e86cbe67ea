"""Train three tiny mixtures of experts on text: Mixtral's shape, Qwen2-MoE's and DeepSeek-V3's.

    python benchmarks/train_mixtures.py --texts pycode.jsonl.gz --to FOLDER
    python benchmarks/acceptance.py FOLDER/mixtral FOLDER/qwen2_moe FOLDER/deepseek_v3 --draft experts:1 \
        --draft experts:1+int8 --draft int8 --texts 'heldout.jsonl#kind=code' --name acceptance_mixtures

What a draft with fewer experts is accepted for says nothing on random weights: routers there send tokens anywhere.
These read the embedded model's tokens, have eight routed experts in each of four layers and train in minutes.
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Trainer,
    TrainingArguments,
)

from selfspec.measure.embedded import model_place

_HIDDEN, _EXPERT, _TOKENS = 128, 192, 256
_SHAPE = {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


def shapes(vocabulary: int) -> dict[str, PretrainedConfig]:
    """Name the mixtures, two experts a token each, the last two with an expert that all tokens share."""
    shape = {**_SHAPE, "vocab_size": vocabulary, "num_experts_per_tok": 2}
    return {
        "mixtral": MixtralConfig(
            **shape, num_key_value_heads=2, intermediate_size=_EXPERT, num_local_experts=8, output_router_logits=True
        ),
        "qwen2_moe": Qwen2MoeConfig(
            **shape, num_key_value_heads=2, num_experts=8, moe_intermediate_size=_EXPERT,
            shared_expert_intermediate_size=_EXPERT, output_router_logits=True,
        ),
        "deepseek_v3": DeepseekV3Config(
            **shape, num_key_value_heads=4, n_routed_experts=8, n_group=1, topk_group=1, moe_intermediate_size=_EXPERT,
            intermediate_size=2 * _EXPERT, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=64,
            qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        ),
    }  # fmt: skip


def main() -> None:
    """Train those that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", required=True, help="JSON lines with a field `text`")
    parser.add_argument("--to", type=Path, required=True, help="folder of the models")
    parser.add_argument("--steps", type=int, default=600, help="of 2,048 tokens")
    parser.add_argument("--only", action="append", help="one of the shapes")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(model_place("demo"))
    texts = load_dataset("json", data_files=options.texts, split="train").shuffle(seed=0)
    # Some six times as many tokens as the steps read.
    texts = texts.select(range(min(len(texts), options.steps * 8 // 3)))

    def blocks(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = list(chain.from_iterable(tokenizer(batch["text"])["input_ids"]))
        cut = [ids[at : at + _TOKENS] for at in range(0, len(ids) - _TOKENS + 1, _TOKENS)]
        return {"input_ids": cut, "labels": cut}

    data = texts.map(blocks, batched=True, remove_columns=texts.column_names)
    for name, config in shapes(len(tokenizer)).items():
        folder = options.to / name
        if (options.only and name not in options.only) or (folder / "config.json").exists():
            continue
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        asked = TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            warmup_steps=50,
            lr_scheduler_type="cosine",
            weight_decay=0.05,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=0,
        )
        Trainer(model, asked, train_dataset=data).train()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
