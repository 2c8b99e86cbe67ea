"""Train EAGLE-3 heads (Li et al., 2025, arXiv 2503.01840), in the speculators library's layout.

A head learns the target's own distribution, for several tokens in a row, from the target's states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from selfspec.draft.heads.eagle import Eagle3Fusion, eagle3_layers
from selfspec.draft.heads.folder import fill
from selfspec.files.writing import write_json
from selfspec.measure.teacher_forced import Readout
from selfspec.model.early_head import DraftHead
from selfspec.model.gated_view import FeatureTap, Point
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.registry import find_adapter
from selfspec.model.stock_passes import over_cache
from selfspec.tools.train.corpus import Blocks, Split, most_frequent
from selfspec.tools.train.lesson import Acceptance, Lesson
from selfspec.tools.train.recipe import HeadRecipe

# How much less each further token weighs in the loss than the one before it, which must be right first.
_WEIGHT = 0.8
# Bytes of the target's states that are kept for the next epoch.
_MOST_REMEMBERED = 2**31
# Standard deviation of new weights.
_NEW = 0.02
# What a layer has in common with the target's.
_ALIKE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Seen:
    """A target's pass over a batch of `[rows, tokens + 1]`, at the pairs of a token and the one after it.

    Attributes:
        features: states of all tokens but the last, `[rows, tokens, hidden]`, in the order of the points.
        embedded: the embeddings of the tokens after them, the same shape.
        learnt: whether the distribution after a pair is to be learnt, `[rows, tokens]`.
    """

    features: Sequence[Tensor]
    embedded: Tensor
    learnt: Tensor

    def reached(self, step: int) -> Tensor:
        """Return the learnt pairs at which a draft after `step` drafted tokens may end, `[rows, tokens]`."""
        reached = self.learnt.clone()
        reached[:, :step] = False
        return reached


class Eagle3Module(nn.Module):
    """An EAGLE-3 head, run over whole texts by the modules that the drafter itself runs.

    `fusion` joins the target's states, the head of `layers` gives logits of the ids it drafts. `differences` lie
    between the target's ids that it drafts and its own, `[ids]`; None: it drafts all.
    """

    differences: Tensor | None

    def __init__(self, fusion: Eagle3Fusion, layers: PreTrainedModel, differences: Tensor | None, vocabulary: int):
        super().__init__()
        self.fusion = fusion
        self.layers = layers
        self.register_buffer("differences", differences)
        self._vocabulary = vocabulary

    def forward(self, seen: Seen, steps: int) -> list[Tensor]:
        """Draft at all pairs at once; return, by step, the logits at the pairs it has reached, `[pairs, ids]`."""
        adapter = find_adapter(self.layers)
        base, output = adapter.base(self.layers), self.layers.get_output_embeddings()
        tap = FeatureTap(self.layers, adapter, base, ("last",))
        state, cache, found = self.fusion.state(seen.features), DynamicCache(), []
        width = state.shape[1]
        positions = torch.arange(width, device=state.device)[None]
        for step in range(steps):
            # Of the last token before a draft the state is the target's, of drafted ones its own.
            normed = tap.module.get_submodule(base)(
                inputs_embeds=self.fusion.inputs(seen.embedded, state),
                attention_mask=_unrolled(width, step, state),
                position_ids=positions,
                **over_cache(self.layers, cache),
            )[0]
            found.append(output(normed[seen.reached(step)]))
            state = pad(tap.take()["last"][:, :-1], (0, 0, 1, 0))
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by the names that they are published under."""
        inside = self.layers.get_submodule(find_adapter(self.layers).base(self.layers))
        named = {**dict(self.fusion.named_parameters()), **dict(inside.named_parameters())}
        named["lm_head.weight"] = weight_of(self.layers.get_output_embeddings())
        if self.differences is not None:
            tokens = torch.arange(len(self.differences)) + self.differences.cpu()
            named["d2t"] = self.differences
            named["t2d"] = torch.zeros(self._vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
        return named


def _unrolled(width: int, step: int, like: Tensor) -> Tensor:
    """Return the additive mask of pairs in a step over those of all steps so far, `[1, 1, width, (step + 1) * width]`.

    A pair's draft began `step` pairs before it: until there it sees the target's states, then its own.
    """
    seen = torch.ones(width, width, dtype=torch.bool, device=like.device)
    parts = [seen.tril(-step)] + [seen.tril(each - step) & seen.triu(each - step) for each in range(1, step + 1)]
    # Pairs that no draft of this step ends at see themselves, so that what they give is a number.
    parts[-1] = parts[-1] | torch.eye(width, dtype=torch.bool, device=like.device)
    mask = torch.zeros(width, len(parts) * width, dtype=like.dtype, device=like.device)
    return mask.masked_fill(~torch.cat(parts, 1), torch.finfo(like.dtype).min)[None, None]


class Eagle3Lesson(Lesson):
    """Distils a target, in the dtype of its passes, into an EAGLE-3 head.

    It learns by test-time unrolling: each step reads the head's own states of the step before.
    """

    model: Eagle3Module

    def __init__(self, base: PreTrainedModel, recipe: HeadRecipe, text: Split, seed: int) -> None:
        self.held_out = text.held_out
        self._base = base.eval().requires_grad_(False)
        self._adapter = find_adapter(base)
        depth = len(self._adapter.decoder_layers(base))
        # Inputs of three layers that a head reads: those published, or others in a network of few layers.
        few = (min(1, depth - 1), depth // 2, depth - 1)
        self._points: tuple[Point, ...] = (2, depth // 2, depth - 3) if depth >= 6 else few
        self._recipe = recipe
        self._readout = Readout(base, self._adapter)
        # Texts come again in every epoch, and the target's states of them are as they were.
        self._remembered: dict[bytes, Tensor] = {}
        self._tokens: Tensor | None = None
        if recipe.vocabulary is not None:
            self._tokens = most_frequent(text.train.ids, recipe.vocabulary, vocabulary_size(base)).to(base.device)
        self._layers = _layer_config(base)
        layers = eagle3_layers(self._layers, None, normed_residual=False)
        inside = layers.get_submodule(find_adapter(layers).base(layers))
        width, vocabulary = self._layers.hidden_size, vocabulary_size(base)
        with torch.device("meta"):
            fusion = Eagle3Fusion(width, len(self._points), width)
            layers.lm_head = nn.Linear(width, len(self._tokens) if self._tokens is not None else vocabulary, bias=False)
        # A copy, for the base's own weights stay as they are.
        rows = self._kept(weight_of(base.get_output_embeddings()).T).T.float().contiguous().clone()
        for module, weights in (
            # At first it passes on the deepest state alone.
            (fusion, {"fc.weight": torch.eye(width, len(self._points) * width).roll(-width, 1)}),
            (inside, self._begun(inside, seed)),
            (layers.lm_head, {"weight": rows}),
        ):
            fill(module, weights, "the new head")
            # Rows of the language-model head would learn the text by heart, and forget the tokens that it lacks.
            module.requires_grad_(module is not layers.lm_head)
        differences = None if self._tokens is None else self._tokens.cpu() - torch.arange(len(self._tokens))
        self.model = Eagle3Module(fusion, layers, differences, vocabulary).to(base.device)

    def _begun(self, inside: nn.Module, seed: int) -> dict[str, Tensor]:
        """Return weights to begin with: the target's last layer where it fits, so that its states are understood."""
        last: Any = self._adapter.decoder_layers(self._base)[-1]
        drawn, own = torch.Generator().manual_seed(seed), dict(last.named_parameters())
        norms, found = self._norms(last), {}
        for name, parameter in inside.named_parameters():
            if parameter.dim() == 1:
                found[name] = norms.get(name, torch.ones(parameter.shape))
                continue
            found[name] = torch.randn(parameter.shape, generator=drawn) * _NEW
            given, width = own.get(name.removeprefix("layers.0.")), parameter.shape[1]
            # Of what reads an embedding and a state, the part that reads the state.
            if given is not None and len(given) == len(parameter) and given.shape[1] in (width, width // 2):
                found[name][:, -given.shape[1] :] = given.float().cpu()
        return found

    def _norms(self, last: Any) -> dict[str, Tensor]:
        """Return the factors of the target's norms, where they are of the head's kind."""
        outermost: Any = self._base.get_submodule(self._adapter.base(self._base))
        named = {
            "layers.0.hidden_norm.weight": getattr(last, "input_layernorm", None),
            "layers.0.post_attention_layernorm.weight": getattr(last, "post_attention_layernorm", None),
            "norm.weight": getattr(outermost, "norm", None),
        }
        ones = torch.ones(1, self._layers.hidden_size, device=self._base.device, dtype=self._base.dtype)
        return {
            name: norm(ones)[0].float().cpu()
            for name, norm in named.items()
            if norm is not None and "RMSNorm" in type(norm).__name__
        }

    def loss(self, model: nn.Module, batch: Blocks, step: int, steps: int) -> Tensor:
        seen, wanted = self._read(batch)
        p = self._kept(wanted.float().softmax(-1))
        places = seen.learnt.nonzero()[:, 1]
        loss, weights = torch.zeros((), device=p.device), 0.0
        # One step after another: each takes as long as the first, and is worth nothing where one before it is wrong.
        for number, logits in enumerate(model(seen, 1 + step % self._recipe.depth)):
            q, weight = logits.float().log_softmax(-1), _WEIGHT**number
            loss = loss - weight * (p[places >= number] * q).sum() / max(len(q), 1)
            weights += weight
        return loss / weights

    def evaluate(self) -> dict[str, float]:
        steps, head = self._recipe.depth, DraftHead(None, self._tokens)
        figures = [Acceptance() for _ in range(steps)]
        accepted = begun = 0
        for batch in self.measured():
            seen, wanted = self._read(batch)
            places = seen.learnt.nonzero()[:, 1]
            right = torch.zeros(steps, *seen.learnt.shape, dtype=torch.bool)
            for number, logits in enumerate(self.model(seen, steps)):
                full, drafted = wanted[places >= number], head.spread(logits, wanted.shape[-1])
                figures[number].add(full, drafted)
                right[number][seen.reached(number).cpu()] = (full.argmax(-1) == drafted.argmax(-1)).cpu()
            # A draft that begins at a pair has its step k at the k-th pair behind it.
            alive = seen.learnt.cpu()[:, : max(seen.learnt.shape[1] - steps + 1, 0)]
            begun += int(alive.sum())
            for number in range(steps):
                alive = alive & right[number][:, number : number + alive.shape[1]]
                accepted += int(alive.sum())
        named = {f"agreement_{number + 1}": each.agreement for number, each in enumerate(figures)}
        named |= {f"alpha_{number + 1}": each.alpha for number, each in enumerate(figures)}
        return {**named, "accepted_greedily": accepted / max(begun, 1)}

    def save(self, folder: Path, dtype: torch.dtype, figures: Mapping[str, float]) -> None:
        content = {
            name: weight.detach().to("cpu", dtype if weight.is_floating_point() else weight.dtype).contiguous()
            for name, weight in self.model.weights().items()
        }
        save_file(content, folder / "model.safetensors", {"format": "pt"})
        write_json(folder / "config.json", {**self._config(), "validation": dict(figures)})

    @torch.no_grad()
    def _read(self, batch: Blocks) -> tuple[Seen, Tensor]:
        """Run the target; return features for the head, and logits after the learnt pairs, `[pairs, vocab]`."""
        # A process of several finds out only now which device is its own.
        self._base.to(batch.ids.device)
        states = self._states(batch.ids)
        learnt = batch.before_learnt[:, 1:]
        embedded, dtype = self._base.get_input_embeddings()(batch.ids[:, 1:]), next(self.model.parameters()).dtype
        features = [states[:, :-1, place].to(dtype) for place in range(len(self._points))]
        wanted = self._readout.logits(states[:, 1:, -1][learnt][None])[0]
        return Seen(features, embedded.to(dtype), learnt), wanted

    def _states(self, ids: Tensor) -> Tensor:
        """Return the target's states at the points and after the last layer, `[rows, tokens, points + 1, hidden]`."""
        keys = [row.numpy().tobytes() for row in ids.cpu()]
        new = [place for place, key in enumerate(keys) if key not in self._remembered]
        found = {key: self._remembered[key] for key in keys if key in self._remembered}
        if new:
            inside = self._adapter.base(self._base)
            tap = FeatureTap(self._base, self._adapter, inside, [*dict.fromkeys([*self._points, "last"])])
            tap.module.get_submodule(inside)(input_ids=ids[new], use_cache=False)
            taken = tap.take()
            rows = torch.stack([taken[point] for point in (*self._points, "last")], 2)
            found |= zip([keys[place] for place in new], rows, strict=True)
            if (len(self._remembered) + len(new)) * rows[0].nbytes <= _MOST_REMEMBERED:
                self._remembered |= {keys[place]: found[keys[place]] for place in new}
        return torch.stack([found[key] for key in keys])

    def _kept(self, values: Tensor) -> Tensor:
        return values if self._tokens is None else values.index_select(-1, self._tokens.to(values.device))

    def _config(self) -> dict[str, Any]:
        layers = self._layers.to_diff_dict() | {"model_type": "llama", "vocab_size": vocabulary_size(self._base)}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": weight_of(self.model.layers.get_output_embeddings()).shape[0],
            "target_hidden_size": self._layers.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self._points),
            "norm_before_residual": False,
            "transformer_layer_config": layers,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self._recipe.depth}],
                "verifier": {
                    "name_or_path": self._base.name_or_path,
                    "architectures": list(self._base.config.architectures or [type(self._base).__name__]),
                },
            },
        }


def _layer_config(base: PreTrainedModel) -> LlamaConfig:
    """Return the configuration of a layer like the target's, of the one type that all engines read."""
    own: Any = base.config.get_text_config(decoder=True)
    given = {name: getattr(own, name) for name in _ALIKE if isinstance(getattr(own, name, None), int | float | str)}
    rotary = getattr(own, "rope_parameters", None)
    if isinstance(rotary, dict) and "rope_theta" in rotary:
        given["rope_parameters"] = dict(rotary)
    config = LlamaConfig(**{"intermediate_size": 4 * own.hidden_size, **given}, num_hidden_layers=1)
    config.vocab_size = 1
    config.tie_word_embeddings = False
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return config
