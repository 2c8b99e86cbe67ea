"""Drafting with a second model over its own cache: classic speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.architecture import Adapter, takes
from selfspec.arguments import check_kind, check_weights, shown
from selfspec.cache.source import Source, source_of
from selfspec.cache.tree import Tree
from selfspec.device import HostCopy, to_device
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import MODEL, Drafter, OwnBytes, drafter
from selfspec.draft.rows_view import RowsView, check_text, made_once
from selfspec.draft.tree_growth import ModelProposer, grow, own_runner
from selfspec.errors import DraftConfigError, UnsupportedModelError, UnsupportedOptionError
from selfspec.model.checkpoint import load_to_device
from selfspec.model.decodable import check_decodable, run_preparation, stock_model
from selfspec.model.early_head import spread
from selfspec.model.identity import tokens_by_id, vocabulary_size, weight_of
from selfspec.model.layer_path import LayerPath
from selfspec.model.registry import check_causal, find_adapter, has_encoder
from selfspec.model.sizes import bytes_read, cache_bytes_of_token, context_of
from selfspec.model.substitutes import Substitutes
from selfspec.runtime.request import PassRequest
from selfspec.runtime.runner import ModelRunner


@drafter("assistant", argument=":FOLDER", help="another checkpoint with the same vocabulary, over a cache of its own")
@dataclass(frozen=True, eq=False, init=False, repr=False)
class Assistant(Drafter):
    """Drafts with a second, smaller model of the same vocabulary (Leviathan et al., 2023; Chen et al., 2023).

    A baseline for self-speculation, it has a cache of its own beside its weights, and drafts as far as its context
    goes. An encoder-decoder needs one that reads the same input; encoders with the same weights are shared.

    Attributes:
        model: the assistant; it is not changed.
        adapter: where it keeps its layers.
        source: the folder that it was loaded from; it follows the device and dtype of each wrapped model. None: the
            caller gave the model, which stays where it is.
    """

    model: PreTrainedModel
    adapter: Adapter
    source: str | None
    runs = "model"

    def __init__(self, model: nn.Module | str | Path, adapter: Adapter | None = None) -> None:
        """Load or take over the assistant.

        Args:
            model: a causal LM or encoder-decoder of a supported architecture, or the folder of a checkpoint.
            adapter: where it keeps its layers, for an architecture that selfspec does not know.

        Raises:
            CheckpointError: the folder cannot be used.
            UnsupportedModelError: the model cannot be decoded.
            DraftConfigError: the argument is no model.
        """
        if not isinstance(model, nn.Module | str | Path):
            raise DraftConfigError(f"an assistant is a model, or the folder of a checkpoint; got {shown(model)}")
        source = None if isinstance(model, nn.Module) else str(model)
        own = stock_model(model if isinstance(model, nn.Module) else load_to_device(str(model), device="cpu"))
        check_causal(own)
        run_preparation(own)
        check_weights(own)
        check_kind("adapter", adapter, Adapter, "see docs/your_own_adapter.md, or leave it out")
        adapter = adapter or find_adapter(own)
        for name, value in {"model": own, "adapter": adapter, "source": source}.items():
            object.__setattr__(self, name, value)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        check_decodable(self.model, self.adapter)
        encodes = has_encoder(model)
        if encodes != has_encoder(self.model) or (encodes and self.model.main_input_name != model.main_input_name):
            raise DraftConfigError(
                f"the assistant {type(self.model).__name__} does not read what {type(model).__name__} reads; take a "
                "smaller model of the same family, or draft with the model itself"
            )
        own = {id(weight) for weight in self.model.parameters()}
        if own.issuperset(map(id, model.parameters())):
            raise DraftConfigError(
                "the assistant is the model itself, so that drafting takes as long as decoding; give a smaller model, "
                "or draft with an exit, skipped layers or fewer bits"
            )
        _check_same_tokens(self.model, model)

    def prepare(self, model: PreTrainedModel, substitutes: Substitutes) -> None:
        device = weight_of(model.get_input_embeddings()).device
        if self.source is not None and device.type != "meta":
            self.model.to(device=device, dtype=model.dtype)
            if has_encoder(model) and encoders_are_equal(self.model, model):
                # It uses the model's weights, and its own are freed.
                its = model.get_encoder().state_dict(keep_vars=True)
                for name, weight in self.model.get_encoder().state_dict(keep_vars=True).items():
                    weight.data = its[name].data

    def check_joining(self) -> None:
        raise DraftConfigError(
            "an assistant's keys and values are those of one batch, and rows cannot join it; serve with a draft of the "
            "model itself, such as 'lookup' or 'exit:4'"
        )

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return bytes_read(self.model, self.adapter) / bytes_read(model, adapter)

    def own_bytes(self, model: PreTrainedModel) -> OwnBytes:
        dtype = self.model.dtype if self.source is None else model.dtype
        weights = sum(weight.numel() for weight in self.model.parameters()) * dtype.itemsize
        own = self.model.config.get_text_config(decoder=True)
        return OwnBytes(weights, cache_bytes_of_token(own, dtype))

    def begin(self, rows: RowsView) -> AssistantProposer:
        self._check_rows(rows)
        runner, read = own_runner(rows, self, self.model, self.adapter), rows.runner.cache.source
        if read is not None and made_once(rows, self, partial(encoders_are_equal, self.model)):
            runner.cache.source = Source(read.outputs, read.mask)
        elif read is not None:
            runner.cache.source = source_by(self.model, read)
        return AssistantProposer(rows, runner, self.model, context_of(self.model.config.get_text_config(decoder=True)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__ if self.source is None else repr(self.source)})"

    @property
    def spelling(self) -> str | None:
        return None if self.source is None else f"assistant:{self.source}"

    def _check_rows(self, rows: RowsView) -> None:
        check_decodable(self.model, self.adapter)
        if rows.controller.most.nodes > rows.controller.most.depth:
            self.adapter.check_trees(self.model)
        name, own, device = type(self.model).__name__, self.model.device, rows.last_tokens.device
        check_text(rows, f"the assistant {name}")
        if self.adapter.ragged == "none" and rows.size > 1:
            raise UnsupportedModelError(
                f"the assistant {name} counts positions in a way that rows of different lengths cannot share; pass one "
                "prompt at a time"
            )
        if own != device:
            raise DraftConfigError(f"the assistant {name} is on {own} and the model on {device}; move one of them")


class AssistantProposer(ModelProposer):
    """Reads each row's committed text, and draft tokens after it, at most `context` tokens; None: any number.

    The next draft keeps the nodes that the committed text contains. Logits are cut to those of the target or filled up
    with -inf.
    """

    def __init__(self, rows: RowsView, runner: ModelRunner, model: nn.Module, context: int | None = None) -> None:
        super().__init__(rows, runner, [model])
        self._path, self._context = LayerPath.full(runner.depth), context
        # Tokens of the draft's nodes read so far, `[rows, nodes]` each; None: the last committed token is not read yet.
        self._drafted: list[HostCopy] | None = None

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        if self._context is not None:
            # The last token of a draft is not read.
            budget = budget.within(self._context - rows.longest + 1)
        if not budget.depth or not rows.controller.tries(MODEL):
            return rows.no_draft()
        tree = self.tree(rows, budget)
        return grow(rows, tree, self.reader(rows, tree))

    def after_text(self, rows: RowsView, tree: Tree) -> Tensor:
        self._keep_committed(rows)
        if self._rows != list(rows.running):
            # The target runs fewer rows now.
            self._cache.narrow([self._rows.index(row) for row in rows.running])
            self._rows = list(rows.running)
        self._cache.cursors.reserve(max(map(rows.text_length, self._rows)))
        texts = self._catch_up(rows)
        unread = [len(text) - 1 for text in texts]
        tokens = self._tokens(texts, max(unread) + 1)
        logits = self._logits(tokens, first=-1)
        if max(unread):
            self._cache.commit(unread)
        self._cache.open(tree)
        self._tree, self._drafted = tree, [HostCopy(tokens[:, :0])]
        places = to_device(unread, logits.device)[:, None, None]
        return logits.gather(1, places.expand(-1, 1, logits.shape[-1]))

    def after(self, rows: RowsView, tokens: Tensor, first: int) -> Tensor:
        assert self._drafted is not None
        self._drafted.append(HostCopy(tokens))
        return self._logits(self._known(tokens), first)

    def _keep_committed(self, rows: RowsView) -> None:
        """Move the cursors over the token before the last draft, and the draft's committed nodes."""
        if self._drafted is None:
            return
        runs, texts = torch.cat([each.read() for each in self._drafted], 1).tolist(), self._unread_texts(rows)
        # The last token of a text starts the next block.
        paths = [self._followed(run, text)[: len(text) - 1] for run, text in zip(runs, texts, strict=True)]
        self._cache.commit_paths(paths)
        self._drafted = None

    def _followed(self, run: Sequence[int], text: Sequence[int]) -> list[int]:
        """Return the path of a text through the nodes with tokens `run`; it starts at the last committed token, -1."""
        path = [-1]
        for token in text[1:]:
            children = self._tree.children[path[-1] + 1]
            found = next((node for node in children if node < len(run) and run[node] == token), None)
            if found is None:
                break
            path.append(found)
        return path

    def _catch_up(self, rows: RowsView) -> list[list[int]]:
        """Read the tokens that do not fit into one pass with the last one; return the rest of each row."""
        # Layers with a recurrent state read all but the last token here: filler would change their state.
        most = self._cache.cursors.slack if self._cache.rolls_back_by_cursor else 0
        while True:
            texts = self._unread_texts(rows)
            unread = [len(text) - 1 for text in texts]
            if max(unread) <= most:
                return texts
            room = self._cache.cursors.capacity - max(self._cache.seq_lens)
            width = min(self._cache.prefill_widths(unread)[0], room)
            counts = [min(count, width) for count in unread]
            self._runner.prefill(self._tokens(texts, width), counts)
            self._cache.commit(counts)

    def _unread_texts(self, rows: RowsView) -> list[list[int]]:
        cursors = zip(self._rows, self._cache.seq_lens, strict=True)
        return [rows.text(row, cursor) for row, cursor in cursors]

    def _tokens(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        """Return the first tokens of each text, filled up on the right, `[rows, width]`."""
        rows = [[*text[:width], *[0] * (width - len(text))] for text in texts]
        return self._known(to_device(rows, self._runner.device))

    def _known(self, tokens: Tensor) -> Tensor:
        """Replace tokens outside the assistant's vocabulary by one that it knows; it may read any."""
        return tokens.clamp(max=self._runner.vocabulary - 1)

    def _logits(self, tokens: Tensor, first: int) -> Tensor:
        logits = self._runner.run(PassRequest(self._path, tokens, first=first)).logits
        return spread(logits, None, self._vocabulary)


def _check_same_tokens(assistant: PreTrainedModel, model: PreTrainedModel) -> None:
    """Refuse an assistant whose ids mean other tokens; sizes, which padding changes, decide only without tokenizers."""
    sizes = [vocabulary_size(each) for each in (assistant, model)]
    theirs, own = tokens_by_id(assistant), tokens_by_id(model)
    if not theirs or not own:
        if sizes[0] != sizes[1]:
            raise DraftConfigError(
                f"the assistant has a vocabulary of {sizes[0]}, the model one of {sizes[1]}; an assistant needs the "
                "same tokens: take a smaller model of the same family"
            )
        return
    other = next((number for number in sorted(theirs) if own.get(number, theirs[number]) != theirs[number]), None)
    if other is not None:
        raise DraftConfigError(
            f"token {other} is {theirs[other]!r} for the assistant and {own[other]!r} for the model; an assistant "
            "needs the same tokens: take a smaller model of the same family"
        )


def encoders_are_equal(assistant: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Return whether the encoders of two encoder-decoders have the same weights."""
    own, its = (each.get_encoder().state_dict(keep_vars=True) for each in (assistant, model))
    pairs = [(weight, its[name]) for name, weight in own.items() if name in its]
    return own.keys() == its.keys() and all(one.dtype == other.dtype and one.equal(other) for one, other in pairs)


def source_by(assistant: PreTrainedModel, read: Source) -> Source:
    """Read the input of the model's encoder with the assistant's; raise UnsupportedOptionError if it cannot."""
    inputs, name, encoder = read.inputs, assistant.main_input_name, assistant.get_encoder()
    known = len(weight_of(encoder.get_input_embeddings())) if name == "input_ids" else 0
    if inputs is None or (known and (inputs.is_floating_point() or int(inputs.max()) >= known)):
        raise UnsupportedOptionError(
            f"the assistant {type(assistant).__name__} has an encoder of its own, which can read {name} alone, of its "
            "own vocabulary; pass these, or take an assistant with the model's encoder"
        )
    inputs = inputs.to(assistant.dtype) if inputs.is_floating_point() else inputs
    times = len(read.states) // len(inputs)
    given = {name: inputs, "attention_mask": None if read.mask is None else read.mask[::times]}
    try:
        with torch.no_grad():
            outputs = encoder(**{key: each for key, each in given.items() if takes(encoder, key)}, return_dict=True)
    except torch.OutOfMemoryError:
        raise
    # The features differ, in width or in the length of a piece.
    except (RuntimeError, ValueError) as error:
        raise UnsupportedOptionError(
            f"the encoder of the assistant {type(assistant).__name__} cannot read what the model's reads ({error}); "
            "take a smaller model of the same family, or draft with the model itself"
        ) from error
    source = source_of(outputs, None)
    source.narrow([row // times for row in range(len(read.states))])
    source.mask = read.mask
    return source
