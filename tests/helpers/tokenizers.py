"""Small tokenizers, each with characters, spaces and special tokens of its own kind, and chat templates."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_WORDS = ("on", "ce", "once", "up", "upon", "a", "time", "END")


@cache
def byte_fallback() -> PreTrainedTokenizerBase:
    """As older vocabularies of SentencePiece: bytes are tokens of their own, and a space comes before a text."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyzEND,é", "on", "▁on", "▁a", "▁▁"):
        vocabulary[piece] = len(vocabulary)
    merges = [("o", "n"), ("▁", "on"), ("▁", "a"), ("▁", "▁")]
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _finished(built, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def metaspace() -> PreTrainedTokenizerBase:
    """As newer ones: the space before a text is the pre-tokenizer's, and comes before its first word alone."""
    built: Tokenizer = Tokenizer.from_str(byte_fallback().backend_tokenizer.to_str())
    built.normalizer = None
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _finished(built, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def byte_level() -> PreTrainedTokenizerBase:
    """As GPT-2's: every byte is a letter, and tokens may begin with a space and half of a character."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("o", "n"), ("Ġ", "on"), ("Ġ", "a"), ("ð", "Ł"), ("Ġ", "ðŁ"), ("Ã", "«")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    vocabulary["<|end|>"] = len(vocabulary)
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return _finished(built, eos_token="<|end|>")


@cache
def word_piece() -> PreTrainedTokenizerBase:
    """As BERT's: spaces are between words alone, special tokens on both sides, and letters become small."""
    letters = "abcdefghijklmnopqrstuvwxyz,é"
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}
    for piece in (*letters, *(f"##{letter}" for letter in letters), *_WORDS, *(f"##{word}" for word in _WORDS)):
        vocabulary.setdefault(piece, len(vocabulary))
    built = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    built.normalizer = normalizers.Lowercase()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(cleanup=False)
    built.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return _finished(built, bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]")


KINDS = {made.__name__: made for made in (byte_fallback, metaspace, byte_level, word_piece)}


def _finished(built: Tokenizer, **special: str) -> PreTrainedTokenizerBase:
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    return PreTrainedTokenizerFast(tokenizer_object=built, **special)


CALLS = (
    '{% for call in message.tool_calls or [] %}{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name }}'
    "{{ '\", \"arguments\": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}"
)
"""Calls as Hermes writes them."""

PLAIN = (
    "{% for message in messages %}"
    "{% if message.content == 'mute' %}{{ raise_exception('nothing is said') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}" + CALLS + "{{ '\\n' }}"
    "{% endfor %}"
    "{% if tools %}tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Each message on a line, after its role; names of tools on another."""


BARE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ kind }}"
    + CALLS
    + "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The same with all that is said of tools, before the messages, and what a request says of `kind`."""


def written(folder: Path, source: str = PLAIN) -> str:
    file = folder / "template.jinja"
    file.write_text(source, encoding="utf-8")
    return str(file)
