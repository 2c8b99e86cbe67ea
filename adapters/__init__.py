"""The architectures selfspec knows, one declaration a file, found by `config.model_type`."""

from selfspec.adapter import Adapter
from selfspec.adapters import bitnet, gpt2, llama, mistral, qwen2, qwen3

ADAPTERS: dict[str, Adapter] = {
    model_type: module.ADAPTER
    for module in (bitnet, gpt2, llama, mistral, qwen2, qwen3)
    for model_type in module.ADAPTER.model_types
}
"""Every declared adapter by the `model_type` it serves."""
