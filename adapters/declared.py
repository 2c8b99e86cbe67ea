"""Declares architectures: how each differs from the defaults of `Adapter`, in families of like ones."""

from dataclasses import replace

from selfspec.architecture import Adapter
from selfspec.compat import RENAMED_CACHE


def _types(names: str) -> tuple[str, ...]:
    return tuple(names.split())


# Layers in `model.layers`, each with `self_attn` and `mlp`.
_CONVENTIONAL = """
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

# Encoders used as decoders (`is_decoder=True`). Their sublayers add the residual stream themselves.
_BERT = Adapter(
    model_types=_types("""
        bert bert-generation big_bird camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert
        xlm-roberta xlm-roberta-xl
    """),
    layers="{base}.encoder.layer",
    attention="attention",
    mlp=("intermediate", "output"),
    without_attention="input",
    without_mlp="residual",
    requires=(("is_decoder", True),),
)
# Encoder-decoders after the first, and their decoders alone. They count positions from the length of the cache.
_BART = Adapter(
    model_types=_types("""
        bart bigbird_pegasus blenderbot blenderbot-small m2m_100 marian mbart pegasus pegasus_x plbart speech_to_text
        whisper
    """),
    layers="model.decoder.layers",
    attention=("self_attn", "encoder_attn"),
    mlp=("fc1", "fc2"),
    positions="embed_positions",
)
# Relative positions, of which the first layer makes a bias for all.
_T5 = Adapter(
    model_types=("mt5", "t5"),
    layers="decoder.block",
    attention=("layer.0.SelfAttention", "layer.1.EncDecAttention"),
    mlp="layer.2.DenseReluDense",
    layer_returns=3,
    attention_returns=3,
    lends=("has_relative_attention_bias", "relative_attention_bias"),
    ragged="padding",
)
# Layers of attention between layers of Mamba.
_JAMBA = Adapter(("jamba",), attention=("self_attn", "mamba"), recurrent=("mamba",), mlp="feed_forward")
_GPT2 = Adapter(("gpt2", "gpt-sw3", "gpt_bigcode"), layers="transformer.h", attention="attn")
_EXPERTS_OF_GRANITE = ("block_sparse_moe", "shared_mlp")

DECLARED = (
    Adapter(_types(_CONVENTIONAL)),
    # The last layers read keys and values of earlier ones.
    Adapter(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), publishes="store_full_length_kv"),
    # Experts that hand their router scores out.
    Adapter(("gpt_oss",), mlp_returns=2),
    Adapter(("llama4_text",), mlp="feed_forward", mlp_returns=2),
    Adapter(("granitemoe", "granitemoe_swa", "granitemoeshared"), mlp=_EXPERTS_OF_GRANITE),
    # Experts in the attention too.
    Adapter(("jetmoe",), attention="self_attention", attention_returns=3),
    Adapter(("modernbert-decoder",), attention="attn"),
    _GPT2,
    # Rewritten in 5.24, its layers return the bare tensor.
    replace(_GPT2, model_types=("gptj", "codegen"), layer_returns=1 if RENAMED_CACHE else 2),
    # Every other layer looks at a local window.
    replace(_GPT2, model_types=("gpt_neo",), layer_returns=2, ragged="padding"),
    Adapter(("gpt_neox",), layers="gpt_neox.layers", attention="attention"),
    Adapter(("ctrl",), layers="transformer.h", attention="multi_head_attention", mlp="ffn"),
    # An MLP of two linears of the layer.
    Adapter(("opt",), layers="model.decoder.layers", mlp=("fc1", "fc2")),
    Adapter(("xglm", "biogpt"), layers="{base}.layers", mlp=("fc1", "fc2")),
    # Attention and MLP in parallel or not, rotary positions or ALiBi.
    Adapter(("falcon",), layers="transformer.h", attention="self_attention", layer_returns=2, ragged="padding"),
    # ALiBi made of the padding mask, or of the length of the keys; sublayers that add the residual stream themselves.
    Adapter(
        model_types=("bloom",),
        layers="transformer.h",
        attention="self_attention",
        layer_returns=2,
        without_attention="residual",
        without_mlp="residual",
        ragged="padding",
    ),
    Adapter(
        model_types=("mpt",),
        layers="transformer.blocks",
        attention="attn",
        mlp="ffn",
        layer_returns=2,
        without_mlp="residual",
        ragged="padding",
    ),
    _JAMBA,
    # Both side by side in every layer, or one of them.
    replace(_JAMBA, model_types=("bamba", "falcon_h1"), layer_returns=2),
    replace(_JAMBA, model_types=("granitemoehybrid",), mlp=_EXPERTS_OF_GRANITE),
    # Layers of attention between short convolutions.
    replace(_JAMBA, model_types=("lfm2", "lfm2_moe"), attention=("self_attn", "conv"), recurrent=("conv",)),
    # Attention and the gated delta rule.
    Adapter(
        _types("lara_mini olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next"),
        attention=("self_attn", "linear_attn"),
        recurrent=("linear_attn",),
    ),
    # One recurrent mixer in each layer, and no MLP.
    Adapter(
        ("falcon_mamba", "mamba", "mamba2"), layers="backbone.layers", attention="mixer", recurrent=("mixer",), mlp=()
    ),
    _BERT,
    replace(_BERT, model_types=("megatron-bert", "rembert"), layer_returns=2),
    # It counts positions from the length of the cache.
    replace(_BERT, model_types=("roformer",), layer_returns=2, ragged="none"),
    # Text alone: a bert after an image encoder.
    replace(_BERT, model_types=("git",), layers="git.encoder.layer", attention_returns=1, requires=()),
    _BART,
    replace(_BART, model_types=("mvp", "trocr"), layer_returns=2),
    # Translation of text and speech.
    replace(
        _BART,
        model_types=("seamless_m4t", "seamless_m4t_v2"),
        attention=("self_attn", "cross_attention"),
        mlp="ffn",
    ),
    # Speech into text, with rotary positions.
    replace(
        _BART,
        model_types=("canary", "cohere_asr", "moonshine", "moonshine_streaming"),
        mlp="mlp",
        positions=None,
    ),
    # An encoder and a decoder of gemma2's layers.
    Adapter(("t5gemma",), layers="model.decoder.layers", attention=("self_attn", "cross_attn")),
    _T5,
    replace(_T5, model_types=("longt5",), layer_returns=5),
    # Every layer has a bias of its own.
    replace(_T5, model_types=("umt5",), layer_returns=1, attention_returns=2, lends=()),
)
