"""Assistants whose layers have queries alone, and read keys and values of the target's cache.

An assistant reads a token and the state before it: the target's for the last committed token, its own for drafted ones.
All tokens of a draft have the position of the last committed token, and no drafted token sees another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.cache.tree import Tree
from selfspec.device import to_device
from selfspec.draft.drafter import Drafter, drafter
from selfspec.draft.heads.folder import FromFolder, HeadFolder
from selfspec.draft.heads.head import check_for_head, step_bytes
from selfspec.draft.rows_view import RowsView, made_once
from selfspec.draft.tree_growth import KeepingProposer, Read
from selfspec.errors import HeadError
from selfspec.formats.format import Format
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.sizes import bytes_read


@drafter(
    "queries", argument=":FOLDER", help="an assistant with queries alone, over keys and values of this model's cache"
)
@dataclass(frozen=True)
class QueriesAssistant(FromFolder):
    """Drafts with an assistant for targets that share keys and values between layers, as the assistant does."""

    holds = "assistant with queries alone"
    essential = ("pre_projection.weight",)

    @staticmethod
    def read_config(config: Mapping[str, Any]) -> frozenset[str]:
        types = (config.get("text_config") or {}).get("layer_types")
        if not types:
            raise ValueError("its config.json names no layer_types")
        return frozenset(map(str, types))

    def in_format(self, format: Format) -> Drafter | None:
        return None

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_for_head(model, "an assistant", None)
        lacks = self._config - _storing(model, adapter).keys()
        hidden, vocabulary = weight_of(model.get_input_embeddings()).shape[1], vocabulary_size(model)
        own = self._shapes.get("model.embed_tokens.weight", (vocabulary,))[0]
        read = self._shapes["pre_projection.weight"][1] // 2
        if lacks or read != hidden or own != vocabulary:
            said = (
                f"it reads states of {read} numbers and drafts {own} tokens, and this one has {hidden} and {vocabulary}"
            )
            raise self.foreign(said + (f", and no keys of {min(lacks)} layers to share" if lacks else ""))

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return step_bytes(self._shapes, model, None) / bytes_read(model, adapter)

    def begin(self, rows: RowsView) -> QueriesProposer:
        return QueriesProposer(rows.size, made_once(rows, self, self._assistant))

    def _assistant(self, model: PreTrainedModel) -> PreTrainedModel:
        try:
            found = AutoModelForCausalLM.from_pretrained(
                HeadFolder.at(self.source).path, dtype=model.dtype, local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            said = " ".join(str(error).split())[:200]
            raise HeadError(f"{self.source} cannot be loaded ({said}); copy it from the original again") from error
        assistant: PreTrainedModel = found.to(model.device).eval().requires_grad_(False)
        return assistant


def _storing(model: PreTrainedModel, adapter: Adapter) -> dict[str, int]:
    """Return, by layer type, the layer whose keys and values the other layers of its type read."""
    attentions: Any = (getattr(layer, "self_attn", None) for layer in adapter.decoder_layers(model))
    return {
        str(each.layer_type): number
        for number, each in enumerate(attentions)
        if getattr(each, "store_full_length_kv", False)
    }


class QueriesProposer(KeepingProposer):
    """Grows drafts with an assistant that has queries alone."""

    def __init__(self, rows: int, assistant: PreTrainedModel) -> None:
        super().__init__(rows, [assistant])
        self._assistant: Any = assistant

    def reader(self, rows: RowsView, tree: Tree) -> Read:
        known = self.stacked(rows)[:, None]
        # The assistant's states of the last committed token and of the nodes read so far.
        made: list[Tensor] = []
        embed, runner = rows.runner.model.get_input_embeddings(), rows.runner
        cache, lengths = runner.cache, runner.cache.seq_lens
        held = {name: cache.layers[number].held() for name, number in _storing(runner.model, runner.adapter).items()}
        # Slots behind a row's last token hold scrap.
        shared = {name: tuple(each[:, :, : max(lengths)] for each in parts) for name, parts in held.items()}
        masks = self._masks(known, max(lengths), lengths)
        position = cache.cursors.position_ids(1)

        def read(tokens: Tensor, first: int) -> Tensor:
            nodes = tokens.shape[1]
            parents = [tree.parents[node] + 1 for node in range(max(first, 0), first + nodes)]
            states = torch.cat(made, 1)[:, parents] if made else known
            inputs = self._assistant.pre_projection(torch.cat([embed(tokens), states], -1))
            found = self._assistant.model(
                inputs_embeds=inputs,
                attention_mask={name: mask.expand(-1, -1, nodes, -1) for name, mask in masks.items()},
                position_ids=position.expand(len(tokens), nodes),
                shared_kv_states=shared,
                use_cache=False,
                # By default it keeps the last one alone.
                logits_to_keep=torch.arange(nodes, device=tokens.device),
            ).last_hidden_state
            made.append(self._assistant.post_projection(found))
            return self._logits(found)

        return read

    def _masks(self, like: Tensor, slots: int, lengths: Sequence[int]) -> dict[str, Tensor]:
        """Return the additive attention mask over all slots, `[rows, 1, 1, slots]`, by layer type."""
        window = self._assistant.config.get_text_config().sliding_window
        back = to_device(lengths, like.device)[:, None] - 1 - torch.arange(slots, device=like.device)
        seen = {"full_attention": back >= 0, "sliding_attention": (back >= 0) & (back <= window)}
        hidden = torch.finfo(like.dtype).min
        return {
            name: like.new_zeros(each.shape).masked_fill(~each, hidden)[:, None, None] for name, each in seen.items()
        }

    def _logits(self, states: Tensor) -> Tensor:
        """Return logits of all tokens, `[rows, nodes, vocab]`; -inf at tokens of groups that were not chosen."""
        groups = self._assistant.masked_embedding
        if groups is None:
            logits: Tensor = self._assistant.lm_head(states)
            return logits
        chosen = groups.centroids(states).topk(groups.centroid_intermediate_top_k, -1).indices
        tokens = groups.token_ordering.long().view(groups.num_centroids, -1)[chosen].flatten(2)
        found = (self._assistant.lm_head.weight[tokens] @ states[..., None])[..., 0]
        spread: Tensor = found.new_full((*states.shape[:2], groups.vocab_size), -torch.inf)
        return spread.scatter_(-1, tokens, found)
