"""A tiny random Whisper that has what its own `generate` reads, and what a pipeline needs beside it."""

from __future__ import annotations

from string import ascii_lowercase

import torch
from transformers import GenerationConfig, PreTrainedModel, WhisperFeatureExtractor, WhisperTokenizer

from helpers.encoder_decoders import START, encoder_decoder

FRAMES, MELS, EOS, PREVIOUS, NO_TIMESTAMPS, TOKENS = 20, 8, 2, 4, 35, 50
"""Frames of a piece; and special tokens, after the last of which are those of timestamps."""


def whisper() -> PreTrainedModel:
    """Make the model, in float32."""
    made = encoder_decoder("whisper", torch.float32)
    made.config.eos_token_id = EOS
    made.generation_config = GenerationConfig(
        decoder_start_token_id=START,
        eos_token_id=EOS,
        pad_token_id=EOS,
        max_length=16,
        suppress_tokens=[5, 6],
        begin_suppress_tokens=[7, EOS],
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        is_multilingual=False,
        return_timestamps=False,
        alignment_heads=[[1, 0]],
    )
    return made


def tokenizer() -> WhisperTokenizer:
    """Make a tokenizer of single letters."""
    special = {
        START: "<|startoftranscript|>",
        EOS: "<|endoftext|>",
        PREVIOUS: "<|startofprev|>",
        NO_TIMESTAMPS: "<|notimestamps|>",
    }
    letters = iter("Ġ" + ascii_lowercase + ".,!?;")
    words = [special.get(token) or next(letters) for token in range(NO_TIMESTAMPS + 1)]
    words += [f"<|{0.02 * number:.2f}|>" for number in range(TOKENS - len(words))]
    vocabulary = {word: token for token, word in enumerate(words)}
    return WhisperTokenizer(vocabulary, [], pad_token=special[EOS], additional_special_tokens=list(special.values()))


def feature_extractor() -> WhisperFeatureExtractor:
    """Make what turns each second of sound into `FRAMES` frames."""
    return WhisperFeatureExtractor(feature_size=MELS, hop_length=16_000 // FRAMES, n_fft=800, chunk_length=1)
