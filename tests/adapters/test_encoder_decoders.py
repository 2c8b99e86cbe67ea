"""The contract of architectures for encoder-decoders: every one that writes text works, or is refused for a reason."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers.contract import CHECKS, has_substitutes
from helpers.encoder_decoders import ENCODER_DECODERS, EncoderDecoder, encoder_decoder_subject, verdict

# One of each shape; the others are slow.
QUICK = ("bart", "m2m_100", "moonshine", "t5", "whisper")


def _cases() -> list[object]:
    """Every type and check; in a plain run each of some types has some of the checks."""
    cases: list[object] = []
    for name in ENCODER_DECODERS:
        for place, check in enumerate(CHECKS if verdict(name) == "works" else ()):
            quick = name in QUICK and (QUICK.index(name) + place) % 3 == 0
            cases.append(pytest.param(name, check, marks=() if quick else pytest.mark.contract, id=f"{name}-{check}"))
    return cases


@functools.cache
def _subject(model_type: str) -> EncoderDecoder:
    return encoder_decoder_subject(model_type)


@pytest.mark.parametrize(("model_type", "check"), _cases())
def test_contract(model_type: str, check: str) -> None:
    CHECKS[check](_subject(model_type))
    if check == "fewer bits":
        assert has_substitutes(_subject(model_type))


@pytest.mark.contract
@pytest.mark.parametrize("model_type", QUICK)
def test_greedy_text_in_float32(model_type: str) -> None:
    tested = encoder_decoder_subject(model_type, torch.float32, seed=1)
    CHECKS["greedy"](tested)
    CHECKS["fewer bits"](tested)


def test_every_type_has_an_adapter_or_a_reason_to_refuse_it() -> None:
    assert [name for name in ENCODER_DECODERS if not verdict(name)] == []
