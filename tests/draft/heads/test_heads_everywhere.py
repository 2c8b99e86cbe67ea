"""Heads of every family where other drafts go, from streamed weights to the server; and those that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import selfspec
import selfspec.runtime
from helpers import published_heads, tiny
from helpers.captures import StandIn, ticking
from helpers.copies import plan
from helpers.drafting import GREEDY
from helpers.joints import assert_rows_are_stock, padded
from helpers.reference_heads import PROMPTS
from helpers.serving import Stepped
from helpers.shrunken import shrunken
from helpers.snapshot import tensor_bytes
from helpers.snippets import Invoke
from selfspec.draft.registry import parse_draft
from selfspec.errors import DraftConfigError, HeadError, UnsupportedOptionError
from selfspec.kernels import native
from selfspec.placement.place import place, plan_checkpoint
from selfspec.placement.survey import survey
from selfspec.placement.weight_source import FromDisk
from selfspec.runtime.graph_cache import GraphCache
from selfspec.serve.row_request import RowRequest

families = pytest.mark.parametrize("kind", published_heads.FAMILIES)
in_bits = pytest.mark.parametrize("bits", ["", "int8+"], ids=["whole", "int8"])


def streamed(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Write a model, and load it so that all layers but one are streamed from the disk."""
    if not (folder / "model.safetensors").exists():
        model.save_pretrained(folder)
    return eager(place(survey(str(folder), None, 128, FromDisk()), plan(1)))


def eager(model: Any) -> Any:
    """Let experts, if a model has any, compute in fp64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@families
def test_a_head_drafts_for_a_model_that_streams_and_stays_in_memory_itself(tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path / "head", intermediate_size=64)
    placed = streamed(model, tmp_path / ("head" if kind.startswith("mtp") else "model"))
    assert any(weight.is_meta for weight in placed.parameters())
    ids, mask = padded(PROMPTS)
    wanted = selfspec.wrap(model).generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY)
    for control in (3, selfspec.FixedLength(3, nodes=6)):
        found = selfspec.wrap(placed, draft, draft_length=control).generate(
            ids, attention_mask=mask, max_new_tokens=12, **GREEDY
        )
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.stats.drafted > 0


@families
def test_a_chat_goes_on_from_a_cache_that_the_head_has_not_read(tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path, intermediate_size=64)
    spec = selfspec.wrap(model, draft, draft_length=3)
    past, text = DynamicCache(), tiny.prompt(9).clamp(min=3)
    for turn in range(3):
        options = {**GREEDY, "attention_mask": torch.ones_like(text), "max_new_tokens": 6}
        found, expected = spec.generate(text, cache=past, **options), model.generate(text, **options)
        assert torch.equal(found.sequences, expected)
        assert found.stats.drafted > 0
        assert past.get_seq_length() == expected.shape[1] - 1
        text = torch.cat([expected, tiny.prompt(4, seed=turn).clamp(min=3)], 1)


@families
@in_bits
def test_a_budget_has_room_for_the_head_and_its_cache(tmp_path: Path, kind: str, bits: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path / "head", intermediate_size=64, moe_intermediate_size=32)
    draft = bits + draft
    folder = tmp_path / ("head" if kind.startswith("mtp") else "model")
    if not kind.startswith("mtp"):
        model.save_pretrained(folder)
    drafter: Any = parse_draft(draft)
    context = 32
    planned, plain = (
        plan_checkpoint(str(folder), "64GiB", None, each, context, FromDisk()).survey.memory
        for each in (drafter, False)
    )
    assert planned.least - planned.process == plain.least - plain.process + planned.draft
    spec = selfspec.wrap(model, draft, draft_length=3)
    taken = spec.generate(tiny.prompt(20), max_new_tokens=context - 20, **GREEDY).stats.draft_bytes
    own = drafter.own_bytes(model)
    assert planned.draft == own.weights + context * own.token + own.row
    # There are further slots for a draft. Not counted are buffers, and the model's embeddings in EAGLE-1's files.
    embeddings = model.get_input_embeddings().weight.nbytes if kind == "eagle1" else 0
    slots = 2 * own.row if kind == "dflash" else 3 * own.token
    # A router is not rounded, and counted as if it were. Kernels keep the scale of an output in float32, of which plans
    # count half: 2 bytes beside the 34 of so narrow an output.
    off = 0.06 if bits == "int8+" and native.available() else 0.01 if bits else 0.005
    assert taken == pytest.approx(planned.draft - embeddings + slots - own.row, rel=off)


@families
@in_bits
def test_a_head_takes_its_weights_and_its_cache_and_nothing_else(tmp_path: Path, kind: str, bits: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path, intermediate_size=64, moe_intermediate_size=32)
    found = {}
    for name in ("none", bits + draft):
        spec = selfspec.wrap(model, name, draft_length=3)
        before = tensor_bytes()
        rounds = spec.stream(tiny.prompt(20), max_new_tokens=24, **GREEDY)
        for _ in range(4):
            next(rounds)
        taken = tensor_bytes() - before
        rounds.close()
        stats = spec.generate(tiny.prompt(20), max_new_tokens=24, **GREEDY).stats
        found[name] = taken - stats.cache_bytes, stats.draft_bytes
    (plain, nothing), (taken, said) = found.values()
    assert nothing == 0
    # States of the last pass are held meanwhile.
    assert said <= taken - plain <= 1.02 * said + 4096


@families
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_head_in_fewer_bits_drafts_about_the_same(tmp_path: Path, kind: str, name: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path, intermediate_size=64, moe_intermediate_size=32)
    whole_head: Any = parse_draft(draft)
    low: Any = parse_draft(f"{name}+{draft}")
    assert low.spelling == f"{name}+{draft}"
    assert low.weight_format.name == name
    ids, mask = padded(PROMPTS)
    asked: dict[str, Any] = {**GREEDY, "attention_mask": mask, "max_new_tokens": 12}
    for control in (3, selfspec.FixedLength(3, nodes=6)):
        whole, rounded = (selfspec.wrap(model, each, draft_length=control) for each in (draft, low))
        wanted, found = whole.generate(ids, **asked), rounded.generate(ids, **asked)
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.stats.drafted > 0
        share = found.stats.draft_bytes / wanted.stats.draft_bytes
        # Of 64 bits a number; there are scales, norms and a cache besides. Without kernels of its own few layers of
        # this size can have 4 bits.
        assert share < (0.45 if name == "int8" else 1)
    if kind != "medusa":
        exact, close = whole_head.made(model), low.made(model)
        inputs = exact.fusion.inputs(*torch.randn(2, 1, 5, 32, dtype=torch.float64))
        bases = (each.layers.get_submodule(each.adapter.base(each.layers)) for each in (exact, close))
        one, other = (base(inputs_embeds=inputs).last_hidden_state for base in bases)
        assert 0 < (one - other).norm() < 0.3 * one.norm()


def test_fewer_bits_are_refused_where_there_are_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = published_heads.with_head("eagle3", tmp_path)
    monkeypatch.setattr("selfspec.formats.rounding.has_kernels", lambda kind: kind == "cuda")
    with pytest.raises(DraftConfigError, match=r"no kernels for a draft head in 8 bits on cpu; leave int8\+ out"):
        selfspec.wrap(model, f"int8+{draft}")


@families
@pytest.mark.parametrize("joined", ["lookup+{}", "recycle+lookup+int8+{}"])
def test_a_head_behind_look_ups(tmp_path: Path, kind: str, joined: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path)
    for control in (3, selfspec.FixedLength(3, nodes=8), None):
        spec = selfspec.wrap(model, joined.format(draft), draft_length=control)
        assert_rows_are_stock(model, spec, [each.repeat(1, 2) for each in PROMPTS], max_new_tokens=16, eos_token_id=7)


@families
def test_a_folder_under_another_kinds_name_says_its_own(tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path)
    own, _, folder = draft.partition(":")
    for name in {"eagle", "medusa", "hydra", "dflash"} - {own}:
        # EAGLE-1's config.json is that of a llama, and an MTP module lies in a whole checkpoint.
        said = f"write {own}:" if kind not in ("eagle1", "mtp") else "holds no|cannot be used"
        with pytest.raises(HeadError, match=said):
            selfspec.wrap(model, f"{name}:{folder or tmp_path}")


@families
@in_bits
def test_a_saved_model_drafts_with_its_head(tmp_path: Path, kind: str, bits: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path / "head")
    selfspec.wrap(model, bits + draft, draft_length=3).save_pretrained(tmp_path / "saved")
    loaded = eager(
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64, trust_remote_code=True)
    )
    found = loaded.generate(PROMPTS[1], return_dict_in_generate=True, max_new_tokens=9, **GREEDY)
    wanted = selfspec.wrap(model).generate(PROMPTS[1], max_new_tokens=9, **GREEDY)
    assert isinstance(found, selfspec.GenerateOutput)
    assert found.stats.drafted > 0
    assert torch.equal(found.sequences, wanted.sequences)


@families
@pytest.mark.tools
def test_commands_take_a_head_by_name(tmp_path: Path, kind: str, invoke: Invoke) -> None:
    model, draft = published_heads.with_head(kind, tmp_path / "model", vocab_size=256)
    if not kind.startswith("mtp"):
        model.save_pretrained(tmp_path / "model" / "base")
    folder = tmp_path / "model" / ("" if kind.startswith("mtp") else "base")
    tiny.tokenizer().save_pretrained(folder)
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "Once upon a time"}\n{"text": "One day, a dog"}\n')
    shared = (str(folder), "--dtype", "float32", "--workload", f"x={texts}", "--max-new-tokens", "16")
    bench = ("--prompts", "2", "--repeats", "1", "--warm-up", "1", "--context", "12", "--measure", "costs")
    ending = invoke("bench", *shared, "--draft", draft, "--arm", "draft", *bench, "--to", str(tmp_path / "bench"))
    assert ending.status == 0, ending.stderr
    assert draft.partition(":")[0] in ending.stdout
    ending = invoke(
        "ablate", "--model", *shared, "--draft", draft, "--confirm", "0", "--temperature", "0", "--texts", "2",
        "--pricing", "weights", "--device", "cpu", "--to", str(tmp_path / "study"),
    )  # fmt: skip
    assert ending.status == 0, ending.stderr
    assert "0 failed" in ending.stdout


@families
def test_a_head_of_text_refuses_embeddings(tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path)
    embeddings = model.get_input_embeddings()(PROMPTS[1])
    spec = selfspec.wrap(model, draft, draft_length=3)
    if kind == "medusa":
        # Of its last token it reads nothing but the state.
        found = spec.generate(inputs_embeds=embeddings, max_new_tokens=9, **GREEDY)
        wanted = selfspec.wrap(model).generate(inputs_embeds=embeddings, max_new_tokens=9, **GREEDY)
        assert torch.equal(found.sequences, wanted.sequences)
        return
    with pytest.raises(UnsupportedOptionError, match="pass the whole text as input_ids"):
        spec.generate(inputs_embeds=embeddings, max_new_tokens=9, **GREEDY)


@families
def test_the_bound_of_a_server_counts_the_heads_own_cache(tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path)
    model.generation_config.eos_token_id = None
    spec = selfspec.wrap(model, draft, draft_length=2)
    engine = Stepped(spec, max_rows=3, tokens=80)
    prompts = [tiny.prompt(3 + 5 * number, seed=number).clamp(min=3) for number in range(6)]
    seen = [
        engine.submit(RowRequest(tuple(each[0].tolist()), 12 + number, {"do_sample": False}))
        for number, each in enumerate(prompts)
    ]
    own = 0
    while engine.scheduler.busy:
        engine.step()
        held = engine.scheduler.stats().cache_bytes
        assert held <= engine.budget.bound
        batch = engine.scheduler._batch
        own = max(own, 0 if batch is None else batch.row_bytes - batch.cache.nbytes)
    assert (own > 0) is (kind != "medusa")
    for number, (prompt, each) in enumerate(zip(prompts, seen, strict=True)):
        whole = selfspec.wrap(model).generate(prompt, max_new_tokens=12 + number, **GREEDY).sequences
        assert list(each.tokens) == whole[0, prompt.shape[1] :].tolist()


@pytest.mark.kernels
@families
def test_native_programs_keep_the_states_that_a_head_reads(tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path / "head", intermediate_size=64)
    eager(model).float()
    stock, native = (
        selfspec.wrap(model, draft, draft_length=3, runtime=each)
        for each in (selfspec.runtime.Eager(), selfspec.runtime.Native(after=0))
    )
    for prompt in PROMPTS[1:]:
        found, wanted = (spec.generate(prompt, max_new_tokens=24, **GREEDY) for spec in (native, stock))
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.stats.accepted == wanted.stats.accepted
    # Which experts a token goes to is read from values, and no program does that.
    kept = any(each.runs.taps for each in native.programs.proved)
    assert kept is (not kind.startswith("mtp")), native.programs.refusals


@pytest.mark.kernels
@pytest.mark.parametrize("nodes", [1, 2], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp", "hydra"])
@in_bits
def test_native_programs_run_the_steps_of_a_head(tmp_path: Path, kind: str, nodes: int, bits: str) -> None:
    if kind == "mtp":
        # MiMo's: in most others are experts, and which of them a token goes to no program reads.
        model, draft = published_heads.mtp(tmp_path, "qwen2").model, "mtp"
    else:
        model, draft = published_heads.with_head(kind, tmp_path, intermediate_size=64)
    model.float()
    control = selfspec.FixedLength(3, nodes=3 * nodes)
    stock, native = (
        selfspec.wrap(model, bits + draft, draft_length=control, runtime=each)
        for each in (selfspec.runtime.Eager(), selfspec.runtime.Native(after=0))
    )
    native.programs = GraphCache(native.runtime, ticking())
    for prompt in PROMPTS[1:]:
        # In fewer bits a sum that differs in its last digit may round an input of the next product to the level beside
        # it, and then another token is drafted.
        for options in ({}, *([] if bits else [{"do_sample": True, "seed": 3}])):
            asked = {**GREEDY, "max_new_tokens": 24, **options}
            found, wanted = (spec.generate(prompt, **asked) for spec in (native, stock))
            assert torch.equal(found.sequences, wanted.sequences)
            assert bits or found.stats.accepted_per_depth == wanted.stats.accepted_per_depth
            assert bits or found.stats.drafted == wanted.stats.drafted
    own = next(each for each in native._memories.values() if isinstance(each, GraphCache))
    assert not own.refusals
    assert own.proved
    assert all(each.embedded for each in own.proved)
    assert native.programs.proved
    assert not any(each.embedded for each in native.programs.proved)


@families
def test_graphs_run_the_steps_of_a_head_in_buckets(tmp_path: Path, kind: str) -> None:
    model, draft = published_heads.with_head(kind, tmp_path)
    ids, mask = padded(PROMPTS)
    asked: dict[str, Any] = {**GREEDY, "attention_mask": mask, "max_new_tokens": 24}
    for control in (3, selfspec.FixedLength(3, nodes=6)):
        spec = selfspec.wrap(model, draft, draft_length=control, runtime=StandIn(0, bucket=8))
        found, wanted = spec.generate(ids, **asked), selfspec.wrap(model).generate(ids, **asked)
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.stats.drafted > 0
        own = [each for each in spec._memories.values() if isinstance(each, GraphCache)]
        assert all(each.runtime.bucket == 8 for each in own)


SPECULATORS = {"layout": "speculators"}
FAR = {"mask_token_id": 3, "target_layer_ids": [1, 9]}
ANOTHER = "trained for another model"
# A kind of head, options of its writer, of the model that it is given to, and the words of the refusal.
MISFITS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("eagle3", SPECULATORS, {"hidden_size": 48}, "trained for another model: .*; it is for some/base"),
    ("eagle3", SPECULATORS, {"num_hidden_layers": 4}, "too few"),
    ("eagle3", SPECULATORS, {"vocab_size": 21}, "of 50 tokens, and this model knows 21"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 30]}, {}, "reads layer 30"),
    ("eagle3", {"target_hidden_size": 48}, {}, "one of width 48, and this one has 32"),
    ("eagle3", {"backbone_hidden_size": 32}, {}, "write queries:"),
    ("dflash", {}, {"hidden_size": 48}, ANOTHER),
    ("dflash", {}, {"vocab_size": 3}, "masks with token 3, and this model knows 3"),
    ("dflash", {"dflash_config": FAR}, {}, "reads layer 10"),
    ("dflash", {"block_size": None}, {}, "lacks target_layer_ids, mask_token_id or block_size"),
    ("eagle3", {"parallel_drafting": True}, {}, "heads of the kind 'peagle' are not read"),
    ("medusa", {}, {"vocab_size": 51}, ANOTHER),
    ("medusa", {}, {"hidden_size": 48}, ANOTHER),
    ("hydra", {}, {"vocab_size": 51}, ANOTHER),
    ("hydra", {}, {"hidden_size": 48}, ANOTHER),
]


@pytest.mark.parametrize(("kind", "of_head", "of_model", "words"), MISFITS)
def test_what_does_not_fit(
    tmp_path: Path, kind: str, of_head: dict[str, Any], of_model: dict[str, Any], words: str
) -> None:
    layers: dict[str, Any] = {"num_hidden_layers": 8}
    write: Any = published_heads.WRITERS[kind]
    folder = write(tmp_path, tiny.llama(**layers), **of_head)
    with pytest.raises(HeadError, match=words):
        selfspec.wrap(tiny.llama(**{**layers, **of_model}), f"{kind.rstrip('13')}:{folder}")


def generated(model: PreTrainedModel, draft: str) -> None:
    selfspec.wrap(model, draft, draft_length=3).generate(PROMPTS[1], max_new_tokens=4, **GREEDY)


@pytest.mark.parametrize(
    ("kind", "lost", "words"),
    [
        ("eagle3", ("d2t", "t2d"), "lacks d2t, which says which"),
        ("dflash", ("layers.1.mlp.up_proj",), r"lacks the weight layers\.1\.mlp\.up_proj\.weight"),
        ("medusa", ("1.1.weight",), r"lacks the weight 1\.1\.weight"),
        ("hydra", ("lm_head.1",), r"lacks the weight hydra_lm_head\.1\.1\.weight"),
        ("hydra", ("prefix",), "no Hydra heads with a prefix layer"),
    ],
)
def test_a_head_that_lacks_a_weight(tmp_path: Path, kind: str, lost: tuple[str, ...], words: str) -> None:
    model = tiny.llama(num_hidden_layers=8)
    published_heads.WRITERS[kind](tmp_path, model)
    (file,) = (each for each in tmp_path.iterdir() if each.suffix in (".pt", ".safetensors"))
    weights = torch.load(file) if file.suffix == ".pt" else load_file(file)
    left = {name: weight for name, weight in weights.items() if not any(part in name for part in lost)}
    torch.save(left, file) if file.suffix == ".pt" else save_file(left, file)
    # Layers of DFlash alone are looked for when it drafts.
    refusing = generated if kind == "dflash" else selfspec.wrap
    with pytest.raises(HeadError, match=words):
        refusing(model, f"{kind.rstrip('13')}:{tmp_path}")


def test_assistants_of_gemma(tmp_path: Path) -> None:
    model = shrunken("gemma4_text")
    folder = published_heads.queries(tmp_path, model)
    with pytest.raises(HeadError, match=ANOTHER):
        selfspec.wrap(tiny.llama(), f"queries:{folder}")
    with pytest.raises(HeadError, match="write queries:"):
        selfspec.wrap(model, f"eagle:{folder}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(HeadError, match="truncated or corrupt"):
        selfspec.wrap(model, f"queries:{folder}")


def test_a_vocabulary_that_is_mapped_wrongly(tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=8)
    folder = published_heads.eagle3(tmp_path, model)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    tokens = weights["t2d"].nonzero()[:, 0]
    others = weights["t2d"].roll(1)
    # Ids in the place of differences, a token of no model, and those of another head.
    changes = [{"d2t": tokens}, {"d2t": weights["d2t"].roll(1)}, {"d2t": weights["d2t"] + 1000}, {"t2d": others}]
    for change in changes:
        save_file({**weights, **change}, file)
        with pytest.raises(HeadError, match=r"to none of this model|name different tokens"):
            selfspec.wrap(model, f"eagle:{folder}").generate(PROMPTS[0], max_new_tokens=8)


def test_damaged_folders(tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=8)
    published_heads.eagle3(tmp_path, model)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    listing = tmp_path / "model.safetensors.index.json"
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    for damage, words in (
        (lambda: weights.write_bytes(weights.read_bytes()[:-40]), "truncated or corrupt"),
        (weights.unlink, "no weights"),
        (lambda: listing.write_text(json.dumps(index)), "lacks 1 of 1 weight files"),
        (lambda: config.write_text("["), "is not readable JSON"),
    ):
        damage()
        with pytest.raises(HeadError, match=words):
            selfspec.wrap(model, f"eagle:{tmp_path}")
    with pytest.raises(HeadError, match="there is no folder"):
        selfspec.wrap(model, f"eagle:{tmp_path / 'nowhere'}")


class Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


def test_a_pickle_of_tensors_is_read_and_one_with_code_is_refused(tmp_path: Path) -> None:
    model = tiny.llama(num_hidden_layers=8)
    folder = published_heads.eagle1(tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    spec = selfspec.wrap(model, f"eagle:{folder}", draft_length=3)
    assert_rows_are_stock(model, spec, PROMPTS, max_new_tokens=12, eos_token_id=7)
    torch.save({**weights, "fc.weight": Runs()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError, match="would run code"):
        selfspec.wrap(model, f"eagle:{folder}")
