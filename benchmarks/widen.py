"""Make a checkpoint of a chosen size that computes exactly what a small trained one does.

    python benchmarks/widen.py MODEL --size 134M --to FOLDER

Timings at a size need weights of that size; acceptance, text and temperatures need a trained model. Here the hidden
states, heads and MLPs of a small llama are padded with zeros, and layers that add nothing are spread between its own.
So the text is the small model's, and a pass costs what the size costs. Norms divide by the mean over all units, so
their weights are scaled by sqrt(d/D) and their epsilon by d/D. Weights that meet nothing but zeros hold noise, so that
no kernel and no quantiser finds a pattern that real weights would not have.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from selfspec.measure.embedded import model_place

_CONTEXT = 512
_OWN = "own"
# Logits that no draw reaches.
_FAR = 60.0


@dataclass(frozen=True)
class Size:
    """The shape of a widened model; heads and groups keep the small model's ratio, and so does a vocabulary of None."""

    hidden: int
    heads: int
    intermediate: int
    layers: int
    vocabulary: int | None = None


SIZES = {
    "134M": Size(hidden=768, heads=12, intermediate=2048, layers=16, vocabulary=32_768),
    "0.5B": Size(hidden=1280, heads=20, intermediate=3456, layers=24, vocabulary=32_768),
    "1.3B": Size(hidden=2048, heads=32, intermediate=5632, layers=24, vocabulary=32_768),
    # About those of Llama 3; few small models have a token so unlikely that others could be made like it.
    "1B": Size(hidden=2048, heads=32, intermediate=8192, layers=16),
    "8B": Size(hidden=4096, heads=64, intermediate=14_336, layers=32),
}


def main() -> None:
    """Widen a checkpoint, and show that its greedy text is the small model's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a small llama, or demo")
    parser.add_argument("--size", choices=[*SIZES, _OWN], default="134M", help="own: the small model's")
    parser.add_argument("--to", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--own-vocabulary", action="store_true", help="keep the small model's")
    parser.add_argument("--device", default="cpu", help="where it is made")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of what is written")
    parser.add_argument("--prompt", default="def ", help="of the greedy text that is compared")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, help="more positions than the small model's, by YaRN, untrained")
    options = parser.parse_args()
    if options.to.exists():
        parser.error(f"{options.to} exists; name another folder")
    place = model_place(options.model)
    small = LlamaForCausalLM.from_pretrained(place, dtype=torch.float32, device_map=options.device)
    tokenizer = AutoTokenizer.from_pretrained(place)
    if options.size == _OWN:
        wide = small
    else:
        size = SIZES[options.size]
        wide = widened(small, replace(size, vocabulary=None) if options.own_vocabulary else size)
    prompt = tokenizer(options.prompt, return_tensors="pt").input_ids.to(options.device)
    texts = [_greedy(model, prompt, options.max_new_tokens) for model in (small, wide)]
    parameters = sum(weight.numel() for weight in wide.parameters())
    print(f"{parameters / 1e6:.0f}M parameters; greedy text equal: {texts[0] == texts[1]}")
    print(f"chance of a token that the small model does not have: {padding_chance(wide, small, prompt):.1e} at most")
    if texts[0] != texts[1]:
        raise SystemExit(1)
    if options.context:
        stretch(wide.config, options.context)
    wide.to(getattr(torch, options.dtype)).save_pretrained(options.to)
    tokenizer.save_pretrained(options.to)


def stretch(config: LlamaConfig, context: int) -> None:
    """Give a configuration more positions, as YaRN does (Peng et al. 2023)."""
    trained = config.max_position_embeddings
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": context / trained,
        "original_max_position_embeddings": trained,
    }
    config.max_position_embeddings = context


def places(own: int, layers: int) -> list[int]:
    """Return where the small model's layers lie in the wide one, evenly spread, the last one last."""
    if layers < own:
        raise ValueError(f"{layers} layers have no room for {own}")
    return [(number + 1) * layers // own - 1 for number in range(own)]


def widened(small: LlamaForCausalLM, size: Size, seed: int = 0) -> LlamaForCausalLM:
    """Return a llama of `size` that computes what `small` computes, in its dtype and on its device.

    A ValueError: the size is smaller than the model, or its heads do not divide as the model's do.
    """
    if small.config.attention_bias or small.config.mlp_bias:
        raise ValueError("biases are not supported; widen a llama without them")
    config = widened_config(small.config, size)
    with small.device:  # random; every weight is replaced below
        wide = AutoModelForCausalLM.from_config(config, dtype=small.dtype).eval()
    generator = torch.Generator(small.device).manual_seed(seed)
    own = dict(zip(places(len(small.model.layers), size.layers), small.model.layers, strict=True))
    scale = (small.config.hidden_size / size.hidden) ** 0.5
    template = small.model.layers[0]
    with torch.no_grad():
        for number, layer in track(list(enumerate(wide.model.layers)), "Widen"):
            # A layer that adds nothing reads as the one before it does, and writes zeros.
            adds, template = number in own, own.get(number, template)
            attention, mlp = template.self_attn, template.mlp
            for name in ("q_proj", "k_proj", "v_proj"):
                _fill_inputs(getattr(layer.self_attn, name).weight, getattr(attention, name).weight, generator)
            for name in ("gate_proj", "up_proj"):
                _fill_inputs(getattr(layer.mlp, name).weight, getattr(mlp, name).weight, generator)
            _fill_outputs(layer.self_attn.o_proj.weight, attention.o_proj.weight, generator, adds)
            _fill_outputs(layer.mlp.down_proj.weight, mlp.down_proj.weight, generator, adds)
            for name in ("input_layernorm", "post_attention_layernorm"):
                _fill_norm(getattr(layer, name).weight, getattr(template, name).weight, scale)
        _fill_norm(wide.model.norm.weight, small.model.norm.weight, scale)
        grows = config.vocab_size > small.config.vocab_size
        unlikely = _unlikely(small, generator) if grows else small.lm_head.weight[0]
        for name in ("get_input_embeddings", "get_output_embeddings"):
            _fill_tokens(getattr(wide, name)().weight, getattr(small, name)().weight, unlikely)
    return wide


def padding_chance(wide: LlamaForCausalLM, small: LlamaForCausalLM, prompt: Tensor) -> float:
    """Return the largest probability, at temperature 1, of all tokens together that only the wide model has."""
    with torch.no_grad():
        probabilities = wide(prompt).logits.double().softmax(-1)
    return float(probabilities[..., small.config.vocab_size :].sum(-1).max())


def widened_config(small: LlamaConfig, size: Size) -> LlamaConfig:
    """Return the configuration of a widened model; errors are those of `widened`."""
    group = small.num_attention_heads // small.num_key_value_heads
    wants = {
        "hidden": (size.hidden, small.hidden_size),
        "heads": (size.heads, small.num_attention_heads),
        "intermediate": (size.intermediate, small.intermediate_size),
        "vocabulary": (size.vocabulary or small.vocab_size, small.vocab_size),
    }
    for name, (wanted, least) in wants.items():
        if wanted < least:
            raise ValueError(f"{name}={wanted} is less than the small model's {least}")
    if size.heads % group:
        raise ValueError(f"heads={size.heads} cannot be shared by groups of {group}, as the small model's are")
    changed = {
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // group,
        "head_dim": small.head_dim,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "vocab_size": wants["vocabulary"][0],
        "rms_norm_eps": small.rms_norm_eps * small.hidden_size / size.hidden,
    }
    config = small.to_dict() | changed
    config.pop("layer_types", None)
    return LlamaConfig(**config)


def _fill_inputs(wide: Tensor, small: Tensor, generator: torch.Generator) -> None:
    """Fill a weight that reads the residual stream, `[out, in]`: its outputs past the small ones are zero."""
    rows, columns = small.shape
    wide.zero_()
    wide[:, columns:] = _noise(wide[:, columns:], small, generator)
    wide[:rows, :columns] = small


def _fill_outputs(wide: Tensor, small: Tensor, generator: torch.Generator, adds: bool) -> None:
    """Fill a weight that writes to the residual stream, `[out, in]`: only to the small one's units, or to none."""
    rows, columns = small.shape
    wide.zero_()
    if adds:
        wide[:rows, columns:] = _noise(wide[:rows, columns:], small, generator)
        wide[:rows, :columns] = small


def _noise(like: Tensor, small: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator, device=like.device)
    return (noise * small.float().std()).to(like.dtype)


def _fill_norm(wide: Tensor, small: Tensor, scale: float) -> None:
    wide.fill_(1.0)
    wide[: small.shape[0]] = small * scale


def _fill_tokens(wide: Tensor, small: Tensor, other: Tensor) -> None:
    """Put rows of tokens `[vocab, hidden]` into a wide table; tokens past the small ones are all `other`."""
    tokens, units = small.shape
    wide.zero_()
    wide[:tokens, :units] = small
    wide[tokens:, :units] = other


def _unlikely(small: LlamaForCausalLM, generator: torch.Generator) -> Tensor:
    """Return a row of the head, `[hidden]`, far below the others at any state; a ValueError if no token's is."""
    tokens = torch.randint(small.config.vocab_size, (1, _CONTEXT), generator=generator, device=small.device)
    highest = small(tokens).logits[0].amax(0)
    least = int(highest.argmin())
    if highest[least] >= 0:
        raise ValueError("every token of the small model may be likely; keep its vocabulary")
    row: Tensor = small.lm_head.weight[least] * (_FAR / -highest[least]).clamp(min=1.0)
    return row


def _greedy(model: LlamaForCausalLM, prompt: Tensor, tokens: int) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None}
    text: list[int] = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()
    return text


if __name__ == "__main__":
    main()
