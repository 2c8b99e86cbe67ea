"""Architectures that need nothing said: layers in `model.layers`, each with `self_attn` and `mlp`."""

from selfspec.model.adapter import Adapter

_NAMES = """
afmoe apertus apertus1p5_text arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cohere_compass_text
cwm deepseek_v2 deepseek_v3 diffllama doge dots1 emu3 emu3_text_model ernie4_5 ernie4_5_moe exaone exaone4
exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite granite granite_swa helium
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum
mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat nemotron
olmo olmo2 olmo3 olmoe persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_mla
sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""

ADAPTER = Adapter(model_types=tuple(_NAMES.split()))
