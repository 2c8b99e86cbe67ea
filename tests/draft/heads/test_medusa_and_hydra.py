"""Medusa and Hydra heads: what they draft is what they were published for, and the text is the target's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import selfspec
from helpers import published_heads, reference_heads, tiny
from helpers.encoder_decoders import FRAMES, MELS, START, encoder_decoder, joint
from helpers.joints import p_value, padded
from helpers.snippets import snippets
from selfspec.draft.heads.hydra import HydraProposer
from selfspec.draft.heads.medusa import MedusaProposer
from selfspec.errors import HeadError

PROMPTS = [tiny.prompt(length, seed=length).clamp(min=1) for length in (3, 9, 1, 6)]
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
HEADS: dict[str, Any] = {
    "medusa": (published_heads.medusa, MedusaProposer, reference_heads.medusa),
    "hydra": (published_heads.hydra, HydraProposer, lambda model, weights, _: reference_heads.hydra(model, weights)),
}
CONTROLS = [5, selfspec.FixedLength(3, nodes=7)]


@pytest.mark.parametrize("control", CONTROLS, ids=str)
@pytest.mark.parametrize(
    ("kind", "blocks", "pickled", "options"),
    [
        ("medusa", 1, True, {}),
        ("medusa", 2, False, {}),
        ("hydra", 1, True, {}),
        ("hydra", 3, True, {}),
        ("hydra", 2, True, {"grounded": False}),
    ],
)
def test_heads_draft_what_they_were_published_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    blocks: int,
    pickled: bool,
    options: dict[str, Any],
    control: Any,
) -> None:
    model = tiny.llama()
    write, proposer, reference = HEADS[kind]
    folder = write(tmp_path / "pickled", model, blocks=blocks, **options)
    weights = torch.load(Path(folder) / f"{kind}_lm_head.pt")
    if not pickled:
        folder = published_heads.medusa(tmp_path, model, blocks=blocks, pickled=False)
    found = reference_heads.recorded_drafts(monkeypatch, proposer)
    ids, mask = padded(PROMPTS)
    spec = selfspec.wrap(model, f"{kind}:{folder}", draft_length=control)
    spec.generate(ids, attention_mask=mask, max_new_tokens=12, **OPTIONS)
    reference_heads.assert_drafts_are(found, reference(model, weights, blocks))
    assert max(each.draft.length for each in found) == 3


@pytest.mark.parametrize(
    ("kind", "lost", "match"),
    [
        ("medusa", "1.1.weight", r"lacks the weight 1\.1\.weight"),
        ("hydra", "lm_head.1", r"lacks the weight hydra_lm_head\.1\.1\.weight"),
        ("hydra", "prefix", "no Hydra heads with a prefix layer"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, kind: str, lost: str, match: str) -> None:
    model = tiny.llama()
    folder = Path(published_heads.WRITERS[kind](tmp_path, model))
    for other in (tiny.llama(vocab_size=51), tiny.llama(hidden_size=48)):
        with pytest.raises(HeadError, match="trained for another model"):
            selfspec.wrap(other, f"{kind}:{folder}")
    file = folder / f"{kind}_lm_head.pt"
    torch.save({name: each for name, each in torch.load(file).items() if lost not in name}, file)
    with pytest.raises(HeadError, match=match):
        selfspec.wrap(model, f"{kind}:{folder}")


def test_heads_draft_for_a_decoder_beside_an_encoder(tmp_path: Path) -> None:
    model = encoder_decoder("bart")
    spec = selfspec.wrap(model, f"medusa:{published_heads.medusa(tmp_path, model)}", draft_length=3)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 9, 9]]), "max_new_tokens": 9}
    found = spec.generate(**inputs, do_sample=False)
    assert torch.equal(found.sequences, model.generate(**inputs, do_sample=False))
    assert found.stats.drafted


@pytest.mark.statistical
def test_heads_that_the_page_on_speech_trains_draft_for_whisper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is the model's greedily, and sampled it has the model's joint."""
    monkeypatch.chdir(tmp_path)
    model = encoder_decoder("whisper", torch.float32, vocab_size=5)
    model.generation_config.max_length = 16
    sounds = torch.randn(6, MELS, FRAMES, generator=torch.Generator().manual_seed(5))
    names: dict[str, Any] = {"selfspec": selfspec, "torch": torch, "model": model, "start": torch.tensor([[START]])}
    names["pieces"] = [{"input_features": sound} for sound in sounds.split(1)]
    exec(snippets("docs/speech.md", "python")[-1], names)
    spec: selfspec.SelfSpeculative = names["spec"]
    for inputs in sounds.split((1, 2, 3)):
        options: dict[str, Any] = {"decoder_input_ids": torch.tensor([[START]] * len(inputs)), "do_sample": False}
        found = spec.generate(inputs, **options)
        assert torch.equal(found.sequences, GenerationMixin.generate(model, inputs, **options))
        assert found.stats.accepted
    sampled: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "top_k": 0}
    texts: list[tuple[int, ...]] = []
    rejected = 0
    for seed in range(2):
        start = torch.tensor([[START]] * 512)
        out = spec.generate(sounds[:1].expand(512, -1, -1), decoder_input_ids=start, seed=seed, **sampled)
        texts += [tuple(row) for row in out.sequences[:, 1:].tolist()]
        rejected += out.stats.judged - out.stats.accepted
    assert rejected
    assert p_value(texts, joint({"input_features": sounds[:1]}, model, 3)) > 1e-3
