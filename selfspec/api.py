"""Wrap a stock `transformers` causal LM so that it drafts for itself: `wrap` and `SelfSpeculative`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from inspect import currentframe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from selfspec.accept import Rule, default_rule, find_rule
from selfspec.architecture import Adapter
from selfspec.arguments import check_kind, check_methods, check_weights, checked_path, shown
from selfspec.control import Control, Controller, CostAware, FixedLength
from selfspec.control.costs import Costs, CostsByRows, CostsOfReading
from selfspec.control.profile import DraftChoice, Profile, Setting, named_draft
from selfspec.decode.generation import (
    Generation,
    JoiningDraft,
    JoiningRows,
    Limits,
    Target,
    generate_in_pieces,
    has_own_generate,
)
from selfspec.decode.options import check_not_dropped
from selfspec.decode.output import GenerateOutput
from selfspec.decode.request import Prepared, Request, prepared_request, read_request
from selfspec.draft import Budget, Cascade, Drafter
from selfspec.draft.drafter import DraftMemory
from selfspec.draft.predicted import Predicted
from selfspec.draft.prediction import AnyPrediction
from selfspec.draft.registry import AUTO, draft_name, parse_draft
from selfspec.errors import (
    ClosedError,
    DraftConfigError,
    PromptError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from selfspec.files.writing import check_output_folder, writing
from selfspec.model.checkpoint import check_device, find_device
from selfspec.model.decodable import check_decodable, check_saved_whole, run_preparation, stock_model
from selfspec.model.identity import vocabulary_size, weight_of
from selfspec.model.layer_path import LayerPath
from selfspec.model.positions import check_rotary
from selfspec.model.registry import check_causal, find_adapter, has_encoder
from selfspec.model.sizes import bytes_read, cache_bytes_read, widening
from selfspec.model.substitutes import Substitutes
from selfspec.model.tensor_parallel import ranks_of
from selfspec.placement.drafts import placement_of
from selfspec.placement.packed import device_of, format_of_weights
from selfspec.placement.place import default_draft, place, plan_checkpoint
from selfspec.placement.weight_source import source_for
from selfspec.placement.weight_stream import check_in_memory
from selfspec.placement.whole import load_whole
from selfspec.recipe import Recipe
from selfspec.runtime import Runtime, usual_runtime
from selfspec.runtime.graph_cache import GraphCache

_OF_THE_MODEL = frozenset(
    {
        "can_generate",
        "config",
        "device",
        "dtype",
        "generation_config",
        "hf_device_map",
        "input_modalities",
        "main_input_name",
        "output_modalities",
    }
)


def wrap(
    model: nn.Module,
    draft: Drafter | Profile | str | Literal[False] | None = None,
    *,
    draft_length: int | Control | None = None,
    accept: str | Rule | None = None,
    adapter: Adapter | None = None,
    runtime: Runtime | None = None,
) -> SelfSpeculative:
    """Make a model draft for itself.

    The model is not changed: every generation runs it through views that share its weights.

    Args:
        model: a causal LM of a supported architecture; wrappers of `torch.compile` and PEFT are removed first.
        draft: a drafter such as `EarlyExit`, its name as on the command line, or a `Profile`; "auto" reads the profile
            that `selfspec calibrate` wrote for this model and machine, "auto:FILE" another one; None or
            False is plain decoding.
        draft_length: tokens drafted each round, at least 1, or a control; None is `CostAware`,
            which drafts as many tokens as pay.
        accept: the rule that judges drafts, or its name, as `selfspec drafts` and docs/exactness.md list them; None is
            `default_rule`.
        adapter: where the model keeps its layers, for an architecture that selfspec does not know.
        runtime: how passes run: `Eager`, `Native`, `CudaGraphs` or `BatchInvariant`, which gives text with a draft the
            bits of plain decoding; None is `CudaGraphs` on one CUDA device, `Eager` where weights stream from the disk,
            else `Native`.

    Raises:
        UnsupportedModelError: the model cannot be gated.
        DraftConfigError: the draft does not fit the model.
        ProfileError: no profile fits model, device, dtype, threads and versions.
        UnsupportedOptionError: no acceptance rule has that name, or an argument has the wrong type.
    """
    model = stock_model(model)
    check_causal(model)
    run_preparation(model)
    check_weights(model)
    check_kind("adapter", adapter, Adapter, "see docs/your_own_adapter.md, or leave it out")
    check_kind("runtime", runtime, Runtime, "write runtime=selfspec.runtime.Eager(), or leave it out")
    found = find_adapter(model) if adapter is None else adapter
    return SelfSpeculative(model, _drafting(model, draft), draft_length, accept, found, runtime)


def load(
    path: str | Path,
    memory: str | int | None = None,
    *,
    weights: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    draft: Drafter | str | bool = True,
    context: int | None = None,
    cache: str | None = None,
) -> SelfSpeculative:
    """Load a checkpoint whole, within a byte budget or with packed weights, without changing a bit; wrap it.

    Whole, its peak is the model and one more weight; what takes more memory than there is is refused before it is read.
    Where memory is short, weights stay pages of the files, which processes share.

    Within a budget, see docs/memory.md, layers that fit stay in memory. The others are streamed: a target pass gets
    each layer's weights when it needs them, from the disk or, on a GPU, from the host's memory, while the next ones
    load. Rounded copies of the streamed layers stay in memory and draft, so that one pass verifies many tokens.

    What another library quantised stays in its bytes where kernels read them.

    Packed weights, see docs/planes.md, take three quarters of the bytes of bfloat16, and a draft that takes none. With
    both, the upper plane of a layer may stay and draft, and a target pass gets the lower one: a quarter of the bits.

    Args:
        path: a folder with safetensors files, or one of `selfspec pack` or a quantising library (see
            docs/quantised.md), whose weights stay packed; or a GGUF file; without a budget, also a name on the model
            hub.
        memory: the most bytes that the process may take on the CPU, or torch on a GPU: "6GiB", or a number; None: all
            there are, and nothing is streamed.
        weights: "planes" packs weights of bfloat16 precision, in a checkpoint or model in bfloat16 or float32; within a
            budget they are packed to a file first. None: they are kept in `dtype`.
        device: the device that computes: "cpu", "cuda", "cuda:1"; None is a CUDA GPU if there is one, else the CPU.
        dtype: torch.float64, float32, bfloat16 or float16 for the weights, or its name; None is the checkpoint's own.
        draft: a drafter or its name, as in `wrap`, where within a budget fewer bits apply to streamed layers alone;
            True is look-ups and copies in the bits with the best predicted speed, if anything is streamed, or look-ups
            and recycled candidates where copies have no room; False is plain decoding, without copies.
        context: the most tokens that the cache holds, for all rows together, beyond which contexts are refused; None is
            4,096, or 2,048, 1,024 or 512 where the budget has no room for more.
        cache: how keys and values are kept: "exact" on the device, "host" exactly in the host's memory, for a GPU, or
            "int8" in 8 bits, which is not lossless, as `out.lossless` then says; None is "exact", or "host" where the
            budget has no room for that.

    Raises:
        CheckpointError: files are missing, truncated or unreadable.
        UnsupportedModelError: there is no adapter for the architecture, or no weight can be packed.
        UnsupportedOptionError: the budget cannot be read, is too small (the message says how much is needed), or is
            more than the memory there is; without one, the model is.
        DraftConfigError: the draft does not fit the model or a budget.
        StorageError: the disk does not give the weights, or has no room for packed ones.
    """
    named = _named(draft)
    given = named if isinstance(named, Drafter) else None
    if memory is None:
        if context is not None or cache is not None:
            raise UnsupportedOptionError(
                "context and cache say what a budget has room for; give memory, or leave them out"
            )
        return wrap(load_whole(str(path), weights, dtype, device, given), given)
    format = format_of_weights(str(path), weights)
    source = source_for(device_of(format, device))
    planned = plan_checkpoint(str(path), memory, dtype, named, context, source, cache, format)
    if given is not None:
        given.check(len(planned.survey.layers) - 1)
    model = place(planned.survey, planned.plan)
    return wrap(model, given or (default_draft(planned.plan) if named else None))


class SelfSpeculative:
    """A wrapped model. Make one with `selfspec.wrap`.

    It holds no state of a generation, so several threads may generate with it at once; give each its own seed. Copies,
    deep ones too, wrap the same model. A pickle contains the model, and no recorded passes.

    It has the attributes that a pipeline of `transformers` reads from its model: `config`, `generation_config`,
    `device`, `dtype`, `can_generate()` and the like.

    Attributes:
        model: the stock model, unchanged.
        draft: the drafter, or a policy that chooses it for each call; None is plain decoding.
        control: sets the draft length, unless a call sets its own.
        rule: judges drafts, unless a call names its own; None is `default_rule`.
        adapter: where the model keeps its layers.
        programs: the passes recorded so far.
        substitutes: the low-precision weights made so far.
        limits: the limits of each call, where memory has a budget.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig
    device: torch.device
    dtype: torch.dtype

    def __init__(
        self,
        model: PreTrainedModel,
        draft: Drafter | Profile | None,
        draft_length: int | Control | None,
        accept: str | Rule | None,
        adapter: Adapter,
        runtime: Runtime | None,
        substitutes: Substitutes | None = None,
    ) -> None:
        self.model = model
        self.draft = draft
        self.control = _control(draft_length)
        self._draft_length = draft_length
        self.rule = None if accept is None else find_rule(accept)
        self.adapter = adapter
        self._wanted_runtime = runtime
        self.runtime = _default_runtime(model) if runtime is None else runtime
        self.programs = GraphCache(self.runtime)
        placement = placement_of(model)
        own = Substitutes.of(model) if placement is None else placement.substitutes
        self.substitutes = own if substitutes is None else substitutes
        self.limits = None if placement is None else Limits(placement.context, placement.at_once, placement.cache)
        self._memories: dict[Hashable, object] = {}
        self._closed = False
        check_decodable(self.model, self.adapter)
        self._prepare()
        self._vocabulary = vocabulary_size(self.model)
        ranks = ranks_of(model)
        if ranks is not None:
            ranks.check_computes_alike()
            ranks.check_alike(
                "how they draft", (draft if isinstance(draft, Profile) else draft_name(draft), self.control)
            )

    # Type checkers would take any name for an attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _OF_THE_MODEL:
                return getattr(self.model, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> SelfSpeculative:
        # Evaluation harnesses copy the options of each request deeply, and batch requests whose options are equal.
        return self

    def __repr__(self) -> str:
        draft = type(self.draft).__name__ if isinstance(self.draft, Profile) else draft_name(self.draft)
        closed = ", unwrapped" if self._closed else ""
        return (
            f"{type(self).__name__}({type(self.model).__name__}, draft={draft!r}, control={self.control!r}, "
            f"rule={self.rule!r}, runtime={self.runtime!r}{closed})"
        )

    def to(self, device: torch.device | str | int) -> SelfSpeculative:
        """Move the model to a device, and return this wrapper.

        Raises:
            UnsupportedOptionError: there is no such device, or the runtime cannot run passes there.
            UnsupportedModelError: weights are streamed.
            ClosedError: this wrapper was unwrapped.
        """
        self._check_open()
        check_in_memory(self.model, "moved")
        self.model.to(find_device(device))
        self._follow_device()
        return self

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | None = None,
        draft_length: int | Control | None = None,
        accept: str | Rule | None = None,
        prediction: AnyPrediction = None,
        **options: Any,
    ) -> GenerateOutput:
        """Generate text. Every argument of `model.generate` means what it means there.

        Args:
            input_ids: prompts, `[batch, prompt]`, left-padded where their lengths differ, or the input of an encoder,
                padded on either side; inputs with other names, such as `input_features`, go in the options.
            attention_mask: 1 for tokens, 0 for padding, of the same shape; None finds padding as `transformers` does,
                by the padding token, if that is not an end token as well.
            generation_config: as in `model.generate`.
            seed: makes sampling repeatable on the same machine, dtype and settings; None draws a seed from torch's
                default generator, so `torch.manual_seed` works.
            draft_length: tokens drafted each round of this call, or a control.
            accept: the rule that judges drafts in this call.
            prediction: what the new text is expected to be, such as a file before an edit: token ids, or a text, which
                needs `tokenizer` too; for all prompts, or a list of one for each (None: none). Its tokens are drafted
                ahead of all others where the text follows them, and change speed alone.
            **options: any other keyword of `model.generate`; unsupported ones are refused by name.

        Returns:
            Sequences, their lengths, and statistics. A model with a `generate` of its own, which may read its input in
            pieces, gives a `Transcript` with the result of that `generate` and the same lengths and statistics.

        Raises:
            PromptError, UnsupportedOptionError, DraftConfigError: before any forward pass except an encoder's.
            NonFiniteLogitsError: the target's logits became NaN or infinite; it carries what was generated.
        """
        if has_own_generate(self.model) and options.get("decoder_input_ids") is None:
            self._check_open()
            inputs = options.pop("inputs", None)
            given = {"attention_mask": attention_mask, "generation_config": generation_config}
            options |= {name: value for name, value in given.items() if value is not None}
            begin = partial(self._begin, draft_length=draft_length, accept=accept)
            inputs = inputs if input_ids is None else input_ids
            return generate_in_pieces(self.model, self.adapter, begin, seed, inputs, options, prediction)
        request = self._read(input_ids, attention_mask, generation_config, options, prediction)
        return self._begin(request, seed, draft_length, accept).finish()

    def stream(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | None = None,
        draft_length: int | Control | None = None,
        accept: str | Rule | None = None,
        prediction: AnyPrediction = None,
        **options: Any,
    ) -> Generation:
        """Generate round by round: the result yields what each round commits. Arguments are as in `generate`.

        The call itself, not the first step, raises errors in the arguments. Do not change the model during the
        iteration: how much of the change later rounds see is undefined. A model with a `generate` of its own streams
        one piece of its input, whose text begins with `decoder_input_ids`.
        """
        if has_own_generate(self.model) and options.get("decoder_input_ids") is None:
            raise UnsupportedOptionError(
                f"stream: the generate of {type(self.model).__name__} may read its input in pieces; call generate, or "
                "pass decoder_input_ids to stream the text of one piece"
            )
        request = self._read(input_ids, attention_mask, generation_config, options, prediction)
        return self._begin(request, seed, draft_length, accept)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        seed: int | None = None,
        draft_length: int | Control | None = None,
        accept: str | Rule | None = None,
        prediction: AnyPrediction = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        """Serve `model.generate(..., custom_generate=spec)`, with the result that `transformers` would return.

        Returns:
            The sequences, `[batch, length]`, or a `GenerateOutput` if `return_dict_in_generate` is set.
        """
        if model is not self.model:
            raise UnsupportedModelError("custom_generate=spec was given another model than the one spec wraps")
        check_not_dropped(currentframe())
        # The mask comes in model_kwargs: transformers would pass it twice to a parameter of that name.
        prepared = Prepared(
            input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor, model_kwargs
        )
        request = prepared_request(model, self.adapter, prepared, prediction, text_alone=self.limits is not None)
        return self._begin(request, seed, draft_length, accept).answer()

    def save_pretrained(self, folder: str | Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Save the model so that it drafts for itself in the `generate` of `transformers`: see `selfspec.saved`.

        Args:
            folder: the folder to save to.
            tokenizer: the model's tokenizer or processor, to save with it.

        Raises:
            UnsupportedModelError: adapters of PEFT are part of the model, or weights are streamed.
            DraftConfigError: the drafter has no name to save it by.
            UnsupportedOptionError: the rule has no name, or an argument has the wrong type.
            StorageError: the folder cannot be written to, or the disk is full.
        """
        self._check_open()
        check_in_memory(self.model, "saved")
        draft = self.draft.saved_from(self.model) if isinstance(self.draft, Drafter) else self.draft
        recipe = Recipe.of(draft, self.control, self.rule)
        check_saved_whole(self.model)
        place = checked_path("folder", folder)
        check_methods("tokenizer", tokenizer, ("save_pretrained",), "pass the model's own, as AutoTokenizer loads it")
        check_output_folder(place)
        with writing(place):
            self.model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        recipe.save(place)

    def forget(self) -> None:
        """Forget what drafters learnt from earlier texts, as in a new wrapper; recorded passes and substitutes stay."""
        for drafter in [key for key, memory in self._memories.items() if isinstance(memory, DraftMemory)]:
            del self._memories[drafter]

    def drafting(
        self, draft: Drafter | Profile | str | Literal[False] | None, draft_length: int | Control | None = None
    ) -> SelfSpeculative:
        """Return a wrapper of the same model with another draft; both share recordings and substitutes.

        Raises:
            DraftConfigError, ProfileError: as in `wrap`.
            ClosedError: this wrapper was unwrapped.
        """
        self._check_open()
        # The wrappers share programs, so these must be of the device where the new one is made.
        self._follow_device()
        found = _drafting(self.model, draft)
        other = SelfSpeculative(
            self.model, found, draft_length, self.rule, self.adapter, self._wanted_runtime, self.substitutes
        )
        other.limits = self.limits
        other.programs = self.programs
        return other

    def joining_rows(self) -> JoiningRows:
        """Return the decoder of rows that join and leave a batch; `selfspec.serve.engine.Engine` runs them.

        Raises:
            UnsupportedModelError: rows of different lengths cannot run side by side.
            DraftConfigError: the drafter cannot draft for rows that come and go.
            UnsupportedOptionError: the rule is not lossless.
            ClosedError: this wrapper was unwrapped.
        """
        self._check_open()
        if has_encoder(self.model):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has an encoder, and rows that come and go have none; call "
                "generate, or let a pipeline of transformers run it, as docs/speech.md shows"
            )
        check_decodable(self.model, self.adapter)
        self._follow_device()
        self._follow_vocabulary()
        self._check_rows_differ()
        if self.rule is not None and not self.rule.lossless:
            raise UnsupportedOptionError(
                f"the rule {self.rule!r} is not lossless, and rows are served with the model's own distribution; wrap "
                "the model without accept=..., or with a rule that is lossless"
            )
        drafting = {greedy: self._joining_draft(self._predicting(choice)) for greedy, choice in self._choices.items()}
        return JoiningRows(self._target(), drafting, self.rule, self._follow_vocabulary)

    def _joining_draft(self, choice: DraftChoice) -> JoiningDraft:
        control = choice.control if self._draft_length is None else _control(self._draft_length)
        controller = self._controller(choice, control.begin_by_load)
        assert choice.draft is not None
        yields = control.yields_to_load and not isinstance(choice.draft, Predicted)
        return JoiningDraft(choice.draft, controller, yields, choice.most_rows)

    def _check_rows_differ(self) -> None:
        if self.adapter.ragged == "none":
            raise UnsupportedModelError(
                f"{type(self.model).__name__} counts positions in a way that rows of different lengths cannot share; "
                "pass one prompt at a time"
            )

    def unwrap(self) -> PreTrainedModel:
        """Return the model, which was never changed, and close this wrapper.

        Raises:
            ClosedError: this wrapper was unwrapped before.
        """
        self._check_open()
        self._closed = True
        self.programs, self.substitutes, self._memories = GraphCache(self.runtime), Substitutes(), {}
        return self.model

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        generation_config: GenerationConfig | None,
        options: dict[str, Any],
        prediction: AnyPrediction,
    ) -> Request:
        self._check_open()
        inputs = options.pop("inputs", None)
        if input_ids is not None and inputs is not None:
            raise PromptError("pass the prompt once: as input_ids or as inputs")
        return read_request(
            self.model,
            self.adapter,
            inputs if input_ids is None else input_ids,
            attention_mask,
            generation_config,
            options,
            prediction,
            text_alone=self.limits is not None,
        )

    def _begin(
        self, request: Request, seed: int | None, draft_length: int | Control | None, accept: str | Rule | None
    ) -> Generation:
        self._check_open()
        known = self.programs.known(self.model)
        if known is None or known.decodable_by is not self.adapter:
            check_decodable(self.model, self.adapter)
            if known is not None:
                known.decodable_by = self.adapter
        self._follow_device()
        self._follow_vocabulary()
        choice = self._choices[request.sampling.greedy].in_batch(request.input_ids.shape[0])
        if any(request.predictions):
            choice = self._predicting(choice)
        choice = self._behind(choice, request.lengths)
        length = self._draft_length if draft_length is None else draft_length
        controller = self._controller(choice, (choice.control if length is None else _control(length)).begin)
        if seed is not None and not (type(seed) is int and -(2**63) <= seed < 2**63):
            raise UnsupportedOptionError(f"seed={seed!r} is no integer of 64 bits; pass e.g. seed=0")
        if request.input_ids.shape[0] > 1:
            self._check_rows_differ()
        widths = [] if self.limits is None else [max(self.limits.at_once // len(request.lengths), 1)]
        if request.prefill_width is not None:
            widths.append(request.prefill_width)
        request = replace(request, prefill_width=min(widths, default=None))
        check_rotary(
            self.model.config.get_text_config(decoder=True),
            request.lengths,
            request.stopping.max_new_tokens,
            min(request.known),
            request.prefill_width,
        )
        rule = (self.rule if accept is None else find_rule(accept)) or default_rule(request.sampling.greedy)
        target = replace(self._target(), known=known)
        return Generation(target, request, draft=choice.draft, control=controller, rule=rule, seed=seed)

    def _predicting(self, choice: DraftChoice) -> DraftChoice:
        """Put predictions before the drafts of a choice."""
        if choice.draft is not None:
            return replace(choice, draft=Cascade(Predicted(), choice.draft))
        return replace(choice, draft=Predicted(), costs=choice.costs or self._costs(0.0))

    def _costs(self, draft: float) -> CostsOfReading:
        """Estimate costs of rounds, by the cost of a draft step."""
        assumed = Costs.assumed(draft, self.model.device, widening(self.model, self.adapter))
        return CostsOfReading(assumed, bytes_read(self.model, self.adapter))

    def _target(self) -> Target:
        # The model may have been changed since it was wrapped.
        self.runtime.check_model(self.model, self.adapter)
        return Target(self.model, self.adapter, self.programs, self.substitutes, self._memories, self.limits)

    def _device(self) -> torch.device:
        device: torch.device = weight_of(self.model.get_input_embeddings()).device
        return device

    def _follow_device(self) -> None:
        """Prepare again where the model has moved, with the default runtime there if none was chosen."""
        if self._prepared_on == self._device():
            return
        if self._wanted_runtime is None and self.runtime != (runtime := _default_runtime(self.model)):
            self.runtime = runtime
            self.programs = GraphCache(runtime)
        self._prepare()

    def _prepare(self) -> None:
        """Check runtime and draft on the model's device, and estimate costs there."""
        self._prepared_on = self._device()
        check_device(self._prepared_on)
        self.runtime.check(self._prepared_on)
        self.runtime.check_model(self.model, self.adapter)
        if isinstance(self.draft, Profile):
            self.draft.check_setting(Setting.of(self.model))
            self._choices = {greedy: self._checked(self.draft.choose_draft(greedy)) for greedy in (True, False)}
        else:
            self._choices = dict.fromkeys((True, False), self._checked(DraftChoice(self.draft)))

    def _follow_vocabulary(self) -> None:
        """Forget earlier texts and check the draft again if the model's vocabulary size has changed."""
        found = vocabulary_size(self.model)
        if found == self._vocabulary:
            return
        if any(isinstance(memory, DraftMemory) for memory in self._memories.values()):
            warnings.warn(
                f"the model has {found} tokens, and had {self._vocabulary} when its drafts learnt from texts: what "
                "they learnt is dropped, and they start again",
                stacklevel=4,
            )
        self.forget()
        self._prepare()
        self._vocabulary = found

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this wrapper was unwrapped; call selfspec.wrap(model) again")

    def _controller(self, choice: DraftChoice, begin: Callable[[CostsByRows], Controller]) -> Controller:
        if choice.draft is None:
            return Controller(Budget.chain(0))
        self._check_depth(choice.draft)
        assert choice.costs is not None
        controller = begin(choice.costs)
        if controller.most.nodes > controller.most.depth:
            self.adapter.check_trees(self.model)
        return controller

    def _checked(self, choice: DraftChoice) -> DraftChoice:
        """Check that the choice fits the model and its memory; return it, with estimated costs if there are none."""
        if choice.draft is not None:
            self._check_depth(choice.draft)
        placement = placement_of(self.model)
        if placement is not None:
            choice = placement.choice(choice, self.model, self.adapter)
        draft = choice.draft
        if draft is None:
            return choice
        draft.check_model(self.model, self.adapter)
        return replace(choice, costs=choice.costs or self._costs(draft.cost(self.model, self.adapter)))

    def _behind(self, choice: DraftChoice, lengths: Sequence[int]) -> DraftChoice:
        """Return the choice; estimated costs become those of rounds that follow texts of these lengths."""
        if choice.draft is None or not isinstance(choice.costs, CostsOfReading) or has_encoder(self.model):
            return choice
        config = self.model.config.get_text_config(decoder=True)
        path = LayerPath.full(len(self.adapter.decoder_layers(self.model)))
        target = cache_bytes_read(config, self.model.dtype, path, lengths)
        draft = choice.draft.cache_bytes_read(self.model, self.adapter, lengths)
        return replace(choice, costs=choice.costs.behind(target, draft))

    def _check_depth(self, draft: Drafter) -> None:
        if not isinstance(draft, Drafter):
            raise DraftConfigError(f"draft must be a drafter such as EarlyExit(layer=4), got {draft!r}")
        draft.check(len(self.adapter.decoder_layers(self.model)))


def _default_runtime(model: PreTrainedModel) -> Runtime:
    placement = placement_of(model)
    devices = (parameter.device for parameter in model.parameters())
    return usual_runtime(devices, placement is not None and placement.streams_from_disk)


def _named(draft: Drafter | str | bool) -> Drafter | bool:
    if isinstance(draft, bool | Drafter):
        return draft
    if isinstance(draft, str) and draft.strip().partition(":")[0] != AUTO:
        return parse_draft(draft) or False
    raise DraftConfigError(
        f"draft={shown(draft)}: within a budget it is a drafter or its name, such as 'lookup+int4', True or False; "
        "profiles are for models that are in memory whole"
    )


def _drafting(
    model: PreTrainedModel, draft: Drafter | Profile | str | Literal[False] | None
) -> Drafter | Profile | None:
    if draft is False:
        return None
    return named_draft(model, draft) if isinstance(draft, str) else draft


def _control(draft_length: int | Control | None) -> Control:
    if draft_length is None:
        return CostAware()
    return draft_length if isinstance(draft_length, Control) else FixedLength(draft_length)
