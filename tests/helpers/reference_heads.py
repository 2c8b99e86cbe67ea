"""Draft heads computed a second time: over whole texts, without a cache, by plain products.

Of each token but the last of a text the state is the target's, and of tokens drafted behind it the head's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

import selfspec
from helpers import tiny
from helpers.joints import assert_rows_are_stock
from helpers.published_heads import MtpCheckpoint
from selfspec.draft import Draft, RowsView

Weights = dict[str, Tensor]
Logits = Callable[[list[int], list[int]], Tensor]
"""What a head gives after a text and draft tokens, `[vocab]`."""


@dataclass(frozen=True)
class Drafted:
    text: list[int]
    draft: Draft
    row: int


PROMPTS = [tiny.prompt(length, seed=length).clamp(min=3) for length in (3, 9, 1, 6)]


def drafts_of(
    patch: Any,
    proposer: type[Any],
    model: PreTrainedModel,
    name: str,
    control: Any,
    prompts: list[Tensor] = PROMPTS,
    new: int = 12,
) -> list[Drafted]:
    """What a draft by name drafts for a ragged batch, whose text is the model's own."""
    found = recorded_drafts(patch, proposer)
    spec = selfspec.wrap(model, name, draft_length=control)
    assert_rows_are_stock(model, spec, prompts, max_new_tokens=new, eos_token_id=7)
    return found


def recorded_drafts(patch: Any, proposer: type[Any]) -> list[Drafted]:
    """Have every draft of a kind of proposer noted down."""
    found: list[Drafted] = []
    propose = proposer.propose

    def noted(self: Any, rows: RowsView, budget: Any) -> Draft:
        known = self.known(rows)
        draft: Draft = propose(self, rows, budget)
        for place, row in enumerate(rows.running):
            if row in rows.unfinished and draft.length and known[place]:
                found.append(Drafted(rows.text(row), draft, place))
        return draft

    patch.setattr(proposer, "propose", noted)
    return found


def assert_drafts_are(found: Sequence[Drafted], logits: Logits) -> None:
    """Every node has the token that its place gives it: the likeliest, or of siblings the next likeliest."""
    assert found
    for each in found:
        tree, tokens = each.draft.tree, each.draft.tokens[each.row].tolist()
        for node in range(-1, len(tree)):
            children = tree.children[node + 1]
            if children:
                before = [tokens[step] for step in tree.paths[node]] if node >= 0 else []
                expected = logits(each.text, before).topk(len(children)).indices.tolist()
                assert [tokens[child] for child in children] == expected


def norm(states: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return states * (states.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(states: Tensor, places: Tensor) -> Tensor:
    """Rotate `[tokens, heads, size]` by positions."""
    size = states.shape[-1]
    angles = places[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([table, table], -1)[:, None].to(states) for table in (angles.cos(), angles.sin()))
    first, second = states.chunk(2, -1)
    return states * cos + torch.cat([-second, first], -1) * sin


def attention(weights: Weights, prefix: str, inputs: Tensor, heads: int = 4, groups: int = 2) -> Tensor:
    """Causal attention of a llama over `[tokens, width]`, the first at position 0."""
    query, key, value = (linear(inputs, weights[f"{prefix}.{name}_proj.weight"]) for name in "qkv")
    count, size = len(inputs), query.shape[-1] // heads
    query, key, value = (each.view(count, -1, size) for each in (query, key, value))
    query, key = (rotated(each, torch.arange(count)) for each in (query, key))
    key, value = (each.repeat_interleave(heads // groups, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(count, -1)
    return linear(mixed, weights[f"{prefix}.o_proj.weight"])


def mlp(weights: Weights, prefix: str, states: Tensor) -> Tensor:
    gate, up = (linear(states, weights[f"{prefix}.{name}_proj.weight"]) for name in ("gate", "up"))
    return linear(silu(gate) * up, weights[f"{prefix}.down_proj.weight"])


def layer(weights: Weights, prefix: str, inputs: Tensor, residual: Tensor, eps: float = 1e-5) -> Tensor:
    """A llama layer, whose attention reads other states than it adds to."""
    states = residual + attention(weights, f"{prefix}.self_attn", inputs)
    inside = norm(states, weights[f"{prefix}.post_attention_layernorm.weight"], eps)
    return states + mlp(weights, f"{prefix}.mlp", inside)


def over_all_tokens(model: PreTrainedModel, weights: Weights, state: Tensor) -> Tensor:
    """Logits of a head with fewer tokens than the model, `[vocab]`."""
    whole = torch.full((model.config.vocab_size,), -torch.inf, dtype=state.dtype)
    whole[torch.arange(len(weights["d2t"])) + weights["d2t"]] = linear(state, weights["lm_head.weight"])
    return whole


@torch.no_grad()
def states_of(model: PreTrainedModel, text: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
    """The target's states as `transformers` gives them, and what leaves its last layer, before the final norm."""
    last: list[Tensor] = []
    layers: Any = model.get_decoder().get_submodule("layers")
    hook = layers[-1].register_forward_hook(
        lambda _, __, output: last.append(output if isinstance(output, Tensor) else output[0])
    )
    known = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    return known, last[0][0]


@torch.no_grad()
def eagle3(
    model: PreTrainedModel, weights: Weights, config: dict[str, Any], points: Sequence[int] = (2, 4, 5)
) -> Logits:
    """EAGLE-3: what it gives after a text and draft tokens, `[vocab]`."""
    first = "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"

    @torch.no_grad()
    def logits(text: list[int], drafted: list[int]) -> Tensor:
        known = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        parts = [known[point][0] for point in points]
        if config.get("fc_norm"):
            parts = [norm(part, weights[f"fc_norm.{place}.weight"]) for place, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if config.get("norm_before_fc"):
            joined = norm(joined, weights["input_norm.weight"])
        states = linear(joined, weights["fc.weight"])
        for count in range(len(drafted) + 1):
            tokens = torch.tensor([*text[1:], *drafted[:count]])
            embedded = model.get_input_embeddings()(tokens)
            normed = norm(states, weights[f"{first}.hidden_norm.weight"])
            inputs = torch.cat([norm(embedded, weights[f"{first}.input_layernorm.weight"]), normed], -1)
            residual = normed if config.get("norm_before_residual") else states
            output = layer(weights, first, inputs, residual)
            normed_output = norm(output, weights["norm.weight"])
            again = normed_output if config.get("norm_output") else output
            states = torch.cat([states, again[-1:]])
        return over_all_tokens(model, weights, normed_output[-1])

    return logits


def eagle1(model: PreTrainedModel, weights: Weights) -> Logits:
    """EAGLE 1 and 2: what it gives after a text and draft tokens, `[vocab]`."""

    @torch.no_grad()
    def logits(text: list[int], drafted: list[int]) -> Tensor:
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        for count in range(len(drafted) + 1):
            tokens = torch.tensor([*text[1:], *drafted[:count]])
            both = torch.cat([model.get_input_embeddings()(tokens), states], -1)
            joined = linear(both, weights["fc.weight"], weights.get("fc.bias"))
            output = layer(weights, "layers.0", joined, joined)
            states = torch.cat([states, output[-1:]])
        found: Tensor = model.get_output_embeddings()(output[-1])
        return found

    return logits


def mtp(checkpoint: MtpCheckpoint, kind: str) -> Logits:
    """The first module for multi-token prediction: what it gives after a text and draft tokens, `[vocab]`."""
    model, block, weights = checkpoint.model, checkpoint.blocks[0], checkpoint.weights[0]
    text: Any = block.config.get_text_config()
    eps = getattr(text, "rms_norm_eps", 1e-6)
    # Norms of some families are kept as what they differ from 1 by.
    beyond = 1.0 if kind.startswith(("qwen3", "step")) else 0.0
    # MiMo is a Qwen2, whose module reads the state before the final norm, and reads it first.
    mimo = kind == "qwen2"

    def made(states: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return what its layer makes of states and of their tokens, and the norm of that."""
        outermost: Any = block.get_decoder()
        embedded = model.get_input_embeddings()(torch.tensor(tokens))
        parts = [
            norm(embedded, weights["embedding"] + beyond, eps),
            norm(states, weights["hidden"] + beyond, eps),
        ]
        inputs = linear(torch.cat(parts[::-1] if mimo else parts, -1), weights["projection"])[None]
        found: list[Any] = []
        hook = outermost.layers[0].register_forward_hook(lambda _, __, output: found.append(output))
        normed = outermost(inputs_embeds=inputs, use_cache=False).last_hidden_state[0]
        hook.remove()
        output: Tensor = found[0] if isinstance(found[0], Tensor) else found[0][0]
        # ERNIE has no final norm.
        return output[0], output[0] if kind == "ernie4_5_moe" else normed

    @torch.no_grad()
    def logits(text: list[int], drafted: list[int]) -> Tensor:
        known, last = states_of(model, text[:-1])
        before = mimo or kind == "step3p7"
        read, tokens = last if before else known[-1][0], [*text, *drafted]
        for _ in range(len(drafted) + 1):
            output, normed = made(read, tokens[1 : 1 + len(read)])
            read = torch.cat([read, (output if kind == "step3p7" else normed)[-1:]])
        assert len(read) == len(tokens)
        if "head" in weights:
            return linear(normed[-1], weights["head"])
        found: Tensor = model.get_output_embeddings()(normed[-1])
        return found

    return logits


def medusa(model: PreTrainedModel, weights: Weights, blocks: int) -> Logits:
    """Medusa heads: what that of the next token gives after a text and draft tokens, `[vocab]`."""

    @torch.no_grad()
    def logits(text: list[int], drafted: list[int]) -> Tensor:
        state = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0, -1]
        head = len(drafted)
        for block in range(blocks):
            state = state + silu(
                weights[f"{head}.{block}.linear.weight"] @ state + weights[f"{head}.{block}.linear.bias"]
            )
        found: Tensor = weights[f"{head}.{blocks}.weight"] @ state
        return found

    return logits


def hydra(model: PreTrainedModel, weights: Weights) -> Logits:
    """Hydra heads: what that of the next token gives after a text and draft tokens, `[vocab]`."""
    prefix = {name.removeprefix("prefix_embeding_layer."): each for name, each in weights.items()}
    eps = model.config.rms_norm_eps

    @torch.no_grad()
    def logits(text: list[int], drafted: list[int]) -> Tensor:
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        inside = norm(states, prefix["layers.0.input_layernorm.weight"], eps)
        last = norm(layer(prefix, "layers.0", inside, states, eps), prefix["norm.weight"], eps)[-1]
        tokens = model.get_input_embeddings()(torch.tensor([text[-1], *drafted]))
        head = len(drafted)
        reads = weights[f"hydra_mlp.{head}.1.linear.weight"].shape[1] // len(last)
        state = torch.cat([last, *tokens])[: reads * len(last)]
        for block in (1, 3, 5):
            place = f"hydra_mlp.{head}.{block}"
            if f"{place}.linear.weight" in weights:
                inner = silu(weights[f"{place}.linear.weight"] @ state + weights[f"{place}.linear.bias"])
                if f"{place}.res_connection.weight" in weights:
                    state = weights[f"{place}.res_connection.weight"] @ state + weights[f"{place}.res_connection.bias"]
                state = state + inner
        found: Tensor = weights[f"hydra_lm_head.{head}.1.weight"] @ state + weights[f"hydra_lm_head.{head}.1.bias"]
        return found

    return logits


def dflash(model: PreTrainedModel, weights: Weights, layers: int, first: int, point: int | str = 3) -> Logits:
    """DFlash with blocks of 4 and mask token 3: what it gives in the place after so many draft tokens, `[vocab]`.

    It reads what leaves the first layer of the target, and at a point: what enters a layer, or leaves the last one
    before or after the final norm.
    """
    eps = 1e-5

    def heads(states: Tensor, name: str, part: str, places: Tensor) -> Tensor:
        made = linear(states, weights[f"{name}.{part}_proj.weight"]).view(len(states), -1, 8)
        if f"{name}.{part}_norm.weight" in weights:
            made = norm(made, weights[f"{name}.{part}_norm.weight"], eps)
        return made if part == "v" else rotated(made, places)

    @torch.no_grad()
    def logits(text: list[int], drafted: list[int]) -> Tensor:
        known, last = states_of(model, text[:-1])
        second = {"last": last, "normed": known[-1][0]}.get(str(point))
        second = known[int(point)][0] if second is None else second
        joined = linear(torch.cat([known[1][0], second], -1), weights["fc.weight"])
        context = norm(joined, weights["hidden_norm.weight"], eps)
        states = model.get_input_embeddings()(torch.tensor([text[-1], 3, 3, 3]))
        places = torch.arange(len(text) + 3)
        for layer in range(layers):
            name = f"layers.{layer}.self_attn"
            inside = norm(states, weights[f"layers.{layer}.input_layernorm.weight"], eps)
            query = heads(inside, name, "q", places[-4:])
            key, value = (heads(torch.cat([context, inside]), name, part, places) for part in "kv")
            key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) / 8**0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(4, -1)
            states = states + linear(mixed, weights[f"{name}.o_proj.weight"])
            inside = norm(states, weights[f"layers.{layer}.post_attention_layernorm.weight"], eps)
            states = states + mlp(weights, f"layers.{layer}.mlp", inside)
        guess = norm(states, weights["norm.weight"], eps)[len(drafted) + first]
        if "d2t" in weights:
            return over_all_tokens(model, weights, guess)
        found: Tensor = model.get_output_embeddings()(guess)
        return found

    return logits
