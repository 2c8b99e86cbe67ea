"""What a gated pass must equal, made without any gate: copies of the stock model that are cut, thinned or zeroed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.shared_cache import SharedCache
from selfspec.formats.packed import Packed
from selfspec.model.gated_view import ExactStates
from selfspec.model.layer_path import LayerPath, Part, Sublayer
from selfspec.model.layer_path import sublayers as all_sublayers
from selfspec.model.registry import find_adapter
from selfspec.model.stock_passes import over_cache
from selfspec.runtime.graph_cache import GraphCache
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner, runner_for

# Of attention and MLP: the module, a linear that every token of it passes, and the linear that ends it.
_PARTS = {Part.ATTENTION: ("self_attn", ".q_proj", ".o_proj"), Part.MLP: ("mlp", ".up_proj", ".down_proj")}
_PARTS_OF_GPT2 = {Part.ATTENTION: ("attn", ".c_attn", ".c_proj"), Part.MLP: ("mlp", ".c_fc", ".c_proj")}


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, found without an adapter."""
    layers = model.transformer.h if model.config.model_type == "gpt2" else model.model.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def _module(model: PreTrainedModel, sublayer: Sublayer, inside: int = 0) -> nn.Module:
    name, *linears = (_PARTS_OF_GPT2 if model.config.model_type == "gpt2" else _PARTS)[sublayer.part]
    return layers_of(model)[sublayer.layer].get_submodule(name + ["", *linears][inside])


def sublayer_module(model: PreTrainedModel, sublayer: Sublayer) -> nn.Module:
    return _module(model, sublayer)


def with_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A copy that has the given layers alone, renumbered."""
    copied = copy.deepcopy(model)
    layers = layers_of(copied)
    chosen = nn.ModuleList([layers[index] for index in kept])
    for number, layer in enumerate(chosen):
        for module in layer.modules():
            if "layer_idx" in module.__dict__:
                module.__dict__["layer_idx"] = number
    layer_types = getattr(copied.config, "layer_types", None)
    copied.config.num_hidden_layers = len(chosen)
    if layer_types is not None:
        copied.config.layer_types = [layer_types[index] for index in kept]
    if copied.config.model_type == "gpt2":
        copied.transformer.h = chosen
    else:
        copied.model.layers = chosen
    return copied


def zeroed(model: PreTrainedModel, sublayers: Iterable[Sublayer]) -> PreTrainedModel:
    """A copy in which the given sublayers add nothing: the weights and biases of their last linear are zero."""
    copied = copy.deepcopy(model)
    for sublayer in sublayers:
        for parameter in _module(copied, sublayer, inside=2).parameters():
            parameter.data.zero_()
    return copied


@torch.no_grad()
def logits_after(
    model: PreTrainedModel,
    prefix: Tensor,
    block: Tensor,
    reference: PreTrainedModel | None = None,
) -> Tensor:
    """Logits over `[batch, tokens]` of a reference, or the model, that finds what the model left of a prefix.

    The prefix, `[batch, past]`, may be empty. The cache is stock: transformers' own, windows and all.
    """
    cache = DynamicCache(config=model.config)
    if prefix.shape[1]:
        model(prefix, **over_cache(model, cache))
    logits: Tensor = (reference or model)(block, **over_cache(model, cache)).logits
    return logits


class Calls:
    """Counts what passes through modules: `calls[name]` and `tokens[name]`, by forward hooks of its own."""

    def __init__(self) -> None:
        self.calls: dict[object, int] = {}
        self.tokens: dict[object, int] = {}

    def watch(self, name: object, module: nn.Module) -> None:
        self.calls[name] = self.tokens[name] = 0
        module.register_forward_hook(self._hook(name))

    def _hook(self, name: object) -> Callable[..., None]:
        def count(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            states = output[0] if isinstance(output, tuple) else output
            assert isinstance(states, Tensor)
            self.calls[name] += 1
            self.tokens[name] += states.shape[1]

        return count


def watched(model: PreTrainedModel) -> Calls:
    """Count what passes the layers, by number, their sublayers, a linear of each, and the head of a model."""
    calls = Calls()
    for index, layer in enumerate(layers_of(model)):
        calls.watch(index, layer)
    for sublayer in all_sublayers(len(layers_of(model))):
        calls.watch(sublayer, sublayer_module(model, sublayer))
        calls.watch(("linear", sublayer), _module(model, sublayer, inside=1))
    calls.watch("head", model.get_output_embeddings())
    return calls


def restored(weight: Packed) -> Tensor:
    """The weight that a kernel multiplies by, inputs' factors and all."""
    scales, factors = weight["scales"].float()[..., None], weight["factors"][..., None, :]
    if "zeros" not in weight.parts:
        return weight["levels"] * scales * factors
    levels = (
        torch.stack([weight["levels"] >> 4, weight["levels"] & 15], -1)
        .flatten(-2)
        .unflatten(-1, (scales.shape[-2], -1))
    )
    evened: Tensor = ((levels.float() - 8) * scales + weight["zeros"].float()[..., None]).flatten(-2)
    return evened * factors


def few_octaves(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Weights of a trained layer in bfloat16: few octaves, some zeros, some outside."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.02
    weight[torch.rand(outputs, inputs, generator=generator) < 0.05] = 0
    weight.view(-1)[50::97] *= 2.0**-20
    return weight.bfloat16()


def every_number(dtype: torch.dtype) -> Tensor:
    """Every pattern of 16 bits as a number."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@torch.no_grad()
def begun(
    model: PreTrainedModel, prompts: Tensor, lengths: Sequence[int], programs: GraphCache | None = None
) -> ModelRunner:
    """A runner whose cache holds prompts, `[rows, tokens]`, of some lengths, with room for 64 tokens or more."""
    adapter, bucket = find_adapter(model), 1 if programs is None else programs.runtime.bucket
    runner = runner_for(model, adapter, adapter.shared_cache(model, len(prompts), 200, 16, bucket=bucket), programs)
    runner.cache.cursors.reserve(32)
    runner.prefill(prompts, lengths)
    runner.cache.commit(lengths)
    return runner


class Bench:
    """A cache that holds the prefix of `[batch, past + block]` tokens, and passes over what comes next."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter, cache: SharedCache, tokens: Tensor, past: int) -> None:
        self.tokens, self.cache = tokens, cache
        self.prefix, self.block = tokens[:, :past], tokens[:, past:]
        self.runner = ModelRunner(model, adapter, cache)
        self.full = LayerPath.full(len(adapter.decoder_layers(model)))
        if past:
            self.states(self.full, self.prefix)
            self.cache.commit([past] * len(tokens))

    @torch.no_grad()
    def logits(self, path: LayerPath, tokens: Tensor | None = None, entering: ExactStates | None = None) -> Tensor:
        return self.runner.run(PassRequest(path, self.block if tokens is None else tokens, entering)).logits

    @torch.no_grad()
    def states(self, path: LayerPath, tokens: Tensor | None = None) -> ExactStates | None:
        return self.runner.run(PassRequest(path, self.block if tokens is None else tokens, headless=True)).states

    @torch.no_grad()
    def steps(self, path: LayerPath) -> tuple[Tensor, ExactStates | None]:
        """Logits and states of the block, one token at a time, as drafts run it."""
        tokens = enumerate(self.block.split(1, 1))
        passes = [self.runner.run(PassRequest(path, token, first=column - 1)) for column, token in tokens]
        states = [step.states for step in passes if step.states is not None]
        logits = torch.cat([step.logits for step in passes], 1)
        return logits, ExactStates.concatenated(states) if states else None

    def keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        """What lies in the slots of the prefix and the block, layer by layer."""
        width = self.tokens.shape[1]
        return [(layer.keys[:, :, :width].clone(), layer.values[:, :, :width].clone()) for layer in self.cache.layers]
