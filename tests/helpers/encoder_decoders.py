"""Every encoder-decoder of `transformers` that writes text, tiny and random, for the contract of architectures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    WhisperFeatureExtractor,
    WhisperTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

import selfspec
from helpers.contract import BATCH, NEW, TOLERANCE, Subject
from helpers.joints import enumerated
from helpers.shrunken import PAD, shrunken
from selfspec.adapters import ADAPTERS, REFUSED
from selfspec.architecture import takes, takes_positions
from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.source import source_of
from selfspec.decode.output import GenerateOutput
from selfspec.model.registry import find_adapter

START = 1
"""Every text of a decoder begins with it."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "whisper": {"max_source_positions": 10, "num_mel_bins": 8},
    "moonshine_streaming": {"num_key_value_heads": 4, "head_dim": 8},
    "speech_to_text": {"input_feat_per_channel": 8, "conv_channels": 16},
}


def encoder_decoder(
    model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> PreTrainedModel:
    """A tiny random encoder-decoder of a type, in evaluation mode. Equal arguments give equal weights."""
    speech = model_type not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForSpeechSeq2Seq if speech else AutoModelForSeq2SeqLM
    chosen = {"is_decoder": False, "is_encoder_decoder": True, **_OPTIONS.get(model_type, {}), **options}
    model = shrunken(model_type, dtype, seed, auto, **chosen)
    model.generation_config = GenerationConfig(pad_token_id=PAD, decoder_start_token_id=START)
    return model


@dataclass(frozen=True)
class EncoderDecoder(Subject):
    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """What the encoder reads of each of `BATCH` rows, of different lengths where it takes a mask."""
        generator = torch.Generator().manual_seed(7)
        name = self.model.main_input_name
        config = self.model.config
        if name == "input_ids":
            shown = torch.randint(self.first, self.vocabulary, (BATCH, 7), generator=generator)
        elif name == "input_values":
            shown = torch.randn(BATCH, 2400, generator=generator, dtype=self.model.dtype)
        elif config.model_type == "whisper":
            frames = 2 * config.max_source_positions
            shown = torch.randn(BATCH, config.num_mel_bins, frames, generator=generator, dtype=self.model.dtype)
        else:
            shape = (BATCH, 24, getattr(config, "input_feat_per_channel", 80))
            shown = torch.randn(*shape, generator=generator, dtype=self.model.dtype)
        mask = torch.ones(shown.shape[:2], dtype=torch.long)
        mask[1, -shown.shape[1] // 3 :] = 0
        return {name: shown} if config.model_type == "whisper" else {name: shown, "attention_mask": mask}

    def rows(self, first: int, rows: int) -> dict[str, Tensor]:
        return {name: value[first : first + rows] for name, value in self.inputs.items()}

    @property
    def pads(self) -> bool:
        return self.adapter.positions is None or takes_positions(self.model)

    @torch.no_grad()
    def cache(self, rows: int) -> SharedCache:
        made = super().cache(rows)
        read = self.rows(0, rows)
        encoder = self.model.get_encoder()
        taken = {name: value for name, value in read.items() if takes(encoder, name)}
        made.source = source_of(encoder(**taken, return_dict=True), read.get("attention_mask"))
        return made

    @torch.no_grad()
    def stock_logits(self, tokens: Tensor, first: int = 0) -> Tensor:
        inputs = self.rows(first, len(tokens))
        logits: Tensor = self.model(**inputs, decoder_input_ids=tokens, use_cache=False).logits
        return logits

    def generated(self, spec: selfspec.SelfSpeculative, prompts: Tensor, mask: Tensor | None) -> GenerateOutput:
        masks = {} if mask is None or not self.pads else {"decoder_attention_mask": mask}
        begins = torch.zeros(len(prompts), dtype=torch.long) if mask is None else mask.argmax(1)
        prompts = prompts.scatter(1, begins[:, None], START)
        options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, **self.rows(0, len(prompts)), **masks}
        return spec.generate(decoder_input_ids=prompts, **options)

    def plain(self, prompts: Tensor, lengths: Any) -> list[list[int]]:
        found = []
        for row, length in enumerate(lengths):
            text = prompts[row : row + 1, -length:].clone()
            text[:, 0] = START
            options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
            inputs = self.rows(row, 1)
            found.append(GenerationMixin.generate(self.model, **inputs, decoder_input_ids=text, **options)[0].tolist())
        return found


def joint(inputs: dict[str, Tensor], model: PreTrainedModel, tokens: int) -> dict[tuple[int, ...], float]:
    """The chance of every text of so many tokens, given one row of what the encoder reads."""

    def decoder(ids: Tensor) -> Any:
        given = {name: value.expand(len(ids), *value.shape[1:]) for name, value in inputs.items()}
        return model(**given, decoder_input_ids=ids)

    return enumerated(decoder, (START,), lambda _, logits: logits.softmax(-1).tolist(), tokens=tokens)


def _classes() -> dict[str, str]:
    listed = {**MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    return {name: listed[name] for name in sorted(listed) if CONFIG_MAPPING[name]().is_encoder_decoder}


ENCODER_DECODERS = _classes()
"""The class of every encoder-decoder that writes text, by type. Others of these lists are decoders that read sound."""


def encoder_decoder_subject(model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> EncoderDecoder:
    model = encoder_decoder(model_type, dtype, seed)
    return EncoderDecoder(model, find_adapter(model), TOLERANCE[dtype])


def verdict(model_type: str) -> str | None:
    """What the declarations say of a type, without running it; None: nothing."""
    if model_type in REFUSED:
        return f"refused because {REFUSED[model_type]}"
    return "works" if model_type in ADAPTERS else None


FRAMES, MELS, EOS, PREVIOUS, NO_TIMESTAMPS, TOKENS = 20, 8, 2, 4, 35, 50
"""Frames of a piece; and special tokens, after the last of which are those of timestamps."""


def whisper() -> PreTrainedModel:
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
