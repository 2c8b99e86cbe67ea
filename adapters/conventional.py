"""Architectures that need nothing said: layers in `model.layers`, each with `self_attn` and `mlp`."""

from selfspec.architecture import Adapter

_NAMES = """
afmoe apertus apertus1p5_text arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cohere_compass_text
cwm deepseek_v2 deepseek_v3 diffllama doge dots1 emu3 emu3_text_model ernie4_5 ernie4_5_moe
ernie4_5_vl_moe_text exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe
glm4_moe_lite glm4v_moe_text glm4v_text glm_ocr_text granite granite_docling_text granite_swa helium
hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna
llama mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mistral4
mixtral molmo2_text muse_glimmer_text nanochat nemotron olmo olmo2 olmo3 olmoe paddleocr_vl_text persimmon phi
phi3 phi4_multimodal phimoe qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe
qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm
starcoder2 step3p5 vaultgemma youtu
"""

ADAPTER = Adapter(model_types=tuple(_NAMES.split()))
