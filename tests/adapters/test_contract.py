"""The contract: every causal LM of `transformers`, and the classes that people download, work or are refused."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

import selfspec
from helpers.captures import StandIn, wrapped
from helpers.checkpoints import MULTIMODAL, TEXT, line
from helpers.checkpoints import table as table_of_checkpoints
from helpers.contract import CHECKS, Subject, bench_of, has_substitutes
from helpers.encoder_decoders import ENCODER_DECODERS, encoder_decoder_subject, verdict
from helpers.shrunken import shrunken
from helpers.survey import MODEL_TYPES, checks, declared, encoder_decoder_rows, rows, subject, table
from selfspec.adapters import ADAPTERS, REFUSED
from selfspec.measure.summary import Weights, describe
from selfspec.runtime import Eager

TABLE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"

# Those with a file of their own and one of each shape, and whether recorded passes of them are quick; others are slow.
RECORDED_QUICKLY = (
    *("bloom", "cohere2", "deepseek_v3", "falcon", "gemma3n_text", "gpt_oss", "jamba", "llama4_text", "mamba2"),
    *("mpt", "opt", "bart"),
)
OTHERS = (
    *("gemma2", "gemma3_text", "gemma4_text", "glm4", "gpt_neo", "gpt_neox", "gptj", "granite", "granitemoeshared"),
    *("llama", "mistral", "mixtral", "olmo2", "phi3", "qwen3_moe", "smollm3", "lfm2", "bert"),
)
QUICK = {name: name in RECORDED_QUICKLY for name in sorted([*RECORDED_QUICKLY, *OTHERS])}

# Those that write text.
QUICK_ENCODER_DECODERS = ("bart", "m2m_100", "moonshine", "t5", "whisper")

# The same for drafts in fewer bits: mixtures, latent attention, a hybrid.
QUICK_IN_FEWER_BITS = ("deepseek_v3", "falcon", "gpt_oss", "jamba", "mixtral")

# Their modules make numbers of lengths, so a recording fails at the next length and the stock modules go on.
NOT_RECORDED = {"falcon"}


WORKING = [name for name in MODEL_TYPES if (declared(name) or "").startswith("works")]


def _cases() -> list[object]:
    """Every type and check; in a plain run each of some types has some of the checks, and every check some types."""
    cases: list[object] = []
    for name in WORKING:
        for place, check in enumerate(checks(name)):
            if check == "fewer bits":
                quick = name in QUICK_IN_FEWER_BITS
            else:
                quick = name in QUICK and (list(QUICK).index(name) + place) % (2 if check == "greedy" else 3) == 0
            cases.append(_case(name, check, subject, quick))
    for name in ENCODER_DECODERS:
        for place, check in enumerate(CHECKS if verdict(name) == "works" else ()):
            quick = name in QUICK_ENCODER_DECODERS and (QUICK_ENCODER_DECODERS.index(name) + place) % 3 == 0
            cases.append(_case(name, check, encoder_decoder_subject, quick))
    return cases


def _case(name: str, check: str, build: Callable[[str], Subject], quick: bool) -> object:
    kind = "" if build is subject else "encoder-decoder "
    return pytest.param(name, check, build, marks=() if quick else pytest.mark.contract, id=f"{kind}{name}-{check}")


@functools.cache
def _subject(model_type: str, build: Callable[[str], Subject]) -> Subject:
    return build(model_type)


@pytest.mark.parametrize(("model_type", "check", "build"), _cases())
def test_contract(model_type: str, check: str, build: Callable[[str], Subject]) -> None:
    tested = _subject(model_type, build)
    CHECKS[check](tested)
    if check == "fewer bits":
        assert has_substitutes(tested)


def _in_float32(model_type: str) -> Subject:
    return Subject(shrunken(model_type, torch.float32, seed=1), ADAPTERS[model_type], tolerance=1e-4)


@pytest.mark.contract
@pytest.mark.parametrize(
    "build",
    [functools.partial(_in_float32, name) for name in QUICK]
    + [functools.partial(encoder_decoder_subject, name, torch.float32, seed=1) for name in QUICK_ENCODER_DECODERS],
    ids=[*QUICK, *(f"encoder-decoder {name}" for name in QUICK_ENCODER_DECODERS)],
)
def test_greedy_text_in_float32(build: Callable[[], Subject]) -> None:
    tested = build()
    CHECKS["greedy"](tested)
    CHECKS["fewer bits"](tested)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if QUICK.get(name) else pytest.mark.contract) for name in WORKING],
)
def test_programs_say_what_the_modules_say(model_type: str) -> None:
    tested = _subject(model_type, subject)
    prompts = tested.tokens(12, tested.batch, seed=5)
    texts = []
    for runtime in (Eager(), StandIn(0, 8)):
        spec = wrapped(tested.model, runtime, selfspec.drafts.EarlyExit(tested.depth - 1))
        texts.append(spec.generate(prompts, max_new_tokens=24, do_sample=False).sequences.tolist())
    assert texts[0] == texts[1]
    if model_type in QUICK and model_type not in NOT_RECORDED:
        assert not [reason for reason in spec.programs.refusals.values() if "depends on values" not in reason]


@pytest.mark.parametrize("model_type", QUICK)
def test_the_anatomy_counts_every_weight_and_what_the_cache_takes(model_type: str) -> None:
    tested = _subject(model_type, subject)
    anatomy = describe(tested.model)
    parts = [anatomy.embedding, *(layer.weights for layer in anatomy.layers), anatomy.final_norm]
    # A tied head may have a bias beside the embedding's weights.
    head = [
        weight for weight in tested.model.get_output_embeddings().parameters() if not anatomy.tied or weight.ndim == 1
    ]
    assert anatomy.total.parameters == sum(part.parameters for part in [*parts, Weights.of(head)])
    bench = bench_of(tested)
    slots = anatomy.cache.bytes_per_token * bench.cache.cursors.capacity * tested.batch
    assert slots == bench.cache.nbytes - bench.cache.state_bytes
    assert (bench.cache.state_bytes > 0) == (anatomy.cache.recurrent_layers > 0)


def test_every_type_has_an_adapter_or_a_reason_to_refuse_it() -> None:
    assert [name for name in MODEL_TYPES if not declared(name)] == []
    assert [name for name in ENCODER_DECODERS if not verdict(name)] == []


def test_the_table_is_fresh() -> None:
    if f"`transformers` {transformers.__version__}," not in TABLE.read_text(encoding="utf-8"):
        pytest.skip("the table is of another transformers")
    assert TABLE.read_text(encoding="utf-8") == table(rows(), encoder_decoder_rows())


@pytest.mark.parametrize(
    ("model_type", "options", "words"),
    [
        *((name, {}, re.escape(REFUSED[name])) for name in ("rwkv", "openai-gpt")),
        ("made_up", {}, r"made_up.*selfspec\.Adapter"),
        ("bert", {"is_decoder": False}, "is_decoder"),
    ],
)
def test_a_refusal_names_the_reason(model_type: str, options: dict[str, Any], words: str) -> None:
    model = shrunken("llama" if model_type == "made_up" else model_type, **options)
    model.config.model_type = model_type
    with pytest.raises(selfspec.errors.UnsupportedModelError, match=words):
        selfspec.wrap(model, selfspec.drafts.EarlyExit(1), draft_length=4)


@pytest.mark.parametrize("way", ["wrapper", "transformers"])
@pytest.mark.parametrize("model_type", ["fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2"])
def test_models_that_also_read_images_decode_text(model_type: str, way: str) -> None:
    """For these `transformers` hands over an empty `mm_encoder_outputs`. One that holds an image is refused."""
    model = shrunken(model_type)
    spec = selfspec.wrap(model, selfspec.drafts.EarlyExit(2), draft_length=3)
    prompt = torch.tensor([[5, 7, 9, 11]])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(prompt, **options)
    if way == "wrapper":
        found = spec.generate(prompt, **options).sequences
    else:
        found = model.generate(prompt, custom_generate=spec, **options)
    assert torch.equal(found, wanted)
    with pytest.raises(selfspec.errors.UnsupportedOptionError, match="mm_encoder_outputs"):
        model.generate(prompt, custom_generate=spec, mm_encoder_outputs={"image": torch.ones(1, 1, 32)}, **options)


def test_an_architecture_that_takes_one_prompt_at_a_time_refuses_two() -> None:
    spec = selfspec.wrap(shrunken("roformer"), selfspec.drafts.EarlyExit(1), draft_length=4)
    with pytest.raises(selfspec.errors.UnsupportedModelError, match="one prompt at a time"):
        spec.generate(torch.full((2, 4), 5), max_new_tokens=3)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
# A plain one, a head inside, positions in sections, states, an adapter of sight into every layer, and refusals.
QUICK_CHECKPOINTS = ("llama4", "llava", "qwen2_vl", "qwen3_5", "qwen3_vl", "mllama", "paligemma")


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in QUICK_CHECKPOINTS else pytest.mark.contract)
        for name in (*TEXT, *MULTIMODAL)
    ],
)
def test_the_line_of_the_table_holds(model_type: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = line(model_type)
    assert "DIFFERS" not in found
    if f"`transformers` {transformers.__version__}:" in page:
        assert found in page.splitlines()


def test_the_page_is_what_its_lines_make() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if f"`transformers` {transformers.__version__}:" not in page:
        pytest.skip("the table is of another transformers")
    lines = [each for each in page.splitlines() if each.startswith("| ") and not each.startswith("| type")]
    assert [each.split(" ")[1] for each in lines] == [*TEXT, *MULTIMODAL]
    assert page == table_of_checkpoints(lines)
