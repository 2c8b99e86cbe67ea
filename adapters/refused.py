"""Architectures that selfspec refuses, each with the reason."""

from selfspec.compat import OLDER_THAN_5_21

_WITH_STATES = """
bailing_hybrid qwen4_exp qwen4_exp_text inkling2_loop_text inkling2_text inkling_text lfm3 minimax
recurrent_gemma rwkv xlstm zamba zamba2 zaya
"""
_WITH_AN_INDEX = """
axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm5_next_text glm_moe_dsa hy_v4 mistral_large4_text
"""
_RECURRENT = "its recurrent state is kept in a way that the shared cache does not copy"
_INDEXED = "its sparse attention keeps an index beside keys and values, which the shared cache does not hold"

BEFORE_5_21: dict[str, str] = (
    {
        "cohere_compass_text": "transformers before 5.21 cannot build it",
        "olmo_hybrid": "in transformers before 5.21 all its layers ask the last one whether there is a state",
    }
    if OLDER_THAN_5_21
    else {}
)
"""Declared types that this version of `transformers` is too old for; none from 5.21 on."""

REFUSED: dict[str, str] = {
    **BEFORE_5_21,
    **dict.fromkeys(_WITH_STATES.split(), _RECURRENT),
    **dict.fromkeys(_WITH_AN_INDEX.split(), _INDEXED),
    **dict.fromkeys(("kimi_linear", "nemotron_h"), "its layers of several kinds go by one name"),
    **dict.fromkeys(
        ("nllb-moe", "switch_transformers"),
        "its experts take a limited number of a pass's tokens, so that a token depends on those beside it",
    ),
    "blt": "it reads bytes and runs a local encoder and decoder around patches of varying length",
    "cpmant": "it puts its own prompt before every text, which the cache does not hold",
    "dbrx": "the residual stream is kept inside its attention, so that a sublayer cannot be left out",
    "gpt_neox_japanese": "its attention hands its bias to the layer apart from its output",
    "dia": "it writes several streams of sound codes at once",
    **dict.fromkeys(
        ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"),
        "it joins two models, each of any architecture",
    ),
    "fsmt": "its decoder lays out tokens before rows",
    "musicgen": "it writes several streams of sound codes at once",
    "musicgen_melody": "it writes several streams of sound codes at once",
    "gemma4_assistant": "it drafts for another model and cannot generate alone",
    "gemma4_unified_assistant": "it drafts for another model and cannot generate alone",
    "dory": "it runs some of its layers several times for each token",
    "hrm_text": "it runs its two stacks of layers several times for each token",
    "led": "its passes over one token are given no mask",
    "longcat_flash": "each of its layers holds two attentions and two MLPs",
    "mllama": "it mixes text with images in cross-attention layers",
    "moss_transcribe_diarize": "it transcribes sound; its language model is a qwen3, which works alone",
    "moshi": "its window is in its own cache alone, not in its masks",
    "openai-gpt": "it has no key-value cache",
    "pop2piano": "it writes notes of music",
    "prophetnet": "it predicts several streams of tokens at once",
    "reformer": "it has no key-value cache: its attention hashes all tokens anew",
    "speecht5": "what embeds its text is not beside its layers",
    "t5gemma2": "its attention reads the text and the encoder's states at once",
    "unlimited_ocr_text": "its windows always show the prompt, which the masks of the shared cache do not",
    "xlm": "it does not take a shared key-value cache",
    "xmod": "its MLP takes the language of each row, and adapts to it",
    "xlnet": "it has no key-value cache: it predicts in permuted order",
}
"""Why, by `model_type`."""
