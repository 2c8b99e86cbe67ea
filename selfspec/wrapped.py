"""The way in: a stock `transformers` causal LM that drafts for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from selfspec.accept import TokenLevel
from selfspec.adapter import Adapter
from selfspec.adapters import ADAPTERS
from selfspec.cache import SharedCache
from selfspec.control import FixedLength
from selfspec.draft import Drafter
from selfspec.errors import (
    ClosedError,
    DraftConfigError,
    NonFiniteLogitsError,
    PromptError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from selfspec.generate import rounds
from selfspec.output import GenerateOutput, Round
from selfspec.passes import Passes
from selfspec.request import Request, prepared_request, read_request
from selfspec.state import State
from selfspec.stats import Stats

DEFAULT_DRAFT_LENGTH = 4
_ATTENTION_KERNELS = ("eager", "sdpa")


def wrap(
    model: PreTrainedModel,
    draft: Drafter | None = None,
    *,
    draft_length: int = DEFAULT_DRAFT_LENGTH,
    adapter: Adapter | None = None,
) -> SelfSpeculative:
    """Make a model draft for itself.

    The model is not changed: every generation runs it through views of its own that share all weights.

    Args:
        model: any causal LM of a supported architecture.
        draft: `EarlyExit`, `LayerSkip` or another drafter; None decodes plainly, in the same loop.
        draft_length: tokens drafted each round, at least 1.
        adapter: where the model keeps its layers, for an architecture selfspec does not know.

    Raises:
        UnsupportedModelError: the model cannot be gated.
        DraftConfigError: the draft does not fit the model.
    """
    return SelfSpeculative(model, draft, draft_length, adapter or find_adapter(model))


def find_adapter(model: PreTrainedModel) -> Adapter:
    """The declared adapter of a model's architecture.

    Raises:
        UnsupportedModelError: there is none, or the model is not a decoder-only causal LM.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model; load it with AutoModelForCausalLM.from_pretrained"
        )
    config, model_type = model.config, model.config.model_type
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(f"{type(model).__name__} is not decoder-only; selfspec decodes causal LMs alone")
    if model_type not in ADAPTERS:
        raise UnsupportedModelError(
            f"no adapter for architecture {model_type!r}; known: {', '.join(sorted(ADAPTERS))}. "
            "Declare one: selfspec.wrap(model, adapter=selfspec.Adapter(...))"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM.from_pretrained"
        )
    return ADAPTERS[model_type]


class SelfSpeculative:
    """A wrapped model. Make one with `selfspec.wrap`.

    It holds the model and the draft's configuration, and nothing of any generation, so several threads may generate
    with it at once, each with a seed of its own.

    Attributes:
        model: the stock model, unchanged.
        draft: what drafts; None for plain decoding.
        draft_length: tokens drafted each round, unless a call says otherwise.
        adapter: where the model keeps its layers.
    """

    def __init__(self, model: PreTrainedModel, draft: Drafter | None, draft_length: int, adapter: Adapter) -> None:
        self.model = model
        self.draft = draft
        self.draft_length = draft_length
        self.adapter = adapter
        self._closed = False
        self._check_model()
        self._check_draft(draft_length)

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | None = None,
        draft_length: int | None = None,
        **options: Any,
    ) -> GenerateOutput:
        """Generate, meaning by every argument what `model.generate` means.

        Args:
            input_ids: prompts, `[batch, prompt]`, left-padded where their lengths differ.
            attention_mask: 1 for tokens, 0 for padding, of the same shape; None: no padding.
            generation_config: as in `model.generate`.
            seed: makes sampling repeatable on the same machine, dtype and settings; None draws a fresh one from
                torch's default generator, so `torch.manual_seed` works as it does in `transformers`.
            draft_length: tokens drafted each round of this call.
            **options: any other keyword of `model.generate`; one that cannot be honoured is refused by name.

        Returns:
            Sequences and stats.

        Raises:
            PromptError, UnsupportedOptionError, DraftConfigError: before any forward pass.
            NonFiniteLogitsError: the target's logits became NaN or infinite; carries what was generated.
        """
        run = self._begin(self._read(input_ids, attention_mask, generation_config, options), seed, draft_length)
        for _ in run.rounds():
            pass
        return run.output()

    def stream(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | None = None,
        draft_length: int | None = None,
        **options: Any,
    ) -> Iterator[Round]:
        """Generate and yield what each round commits, as it does. Arguments and errors as in `generate`.

        Errors in the arguments are raised by the call itself, not by the first step of the iteration.
        """
        run = self._begin(self._read(input_ids, attention_mask, generation_config, options), seed, draft_length)
        return run.rounds()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None = None,
        draft_length: int | None = None,
        **model_kwargs: Any,
    ) -> GenerateOutput | Tensor:
        """Serve `model.generate(..., custom_generate=spec)`: the same, with the result `transformers` would return.

        Returns:
            The sequences, `[batch, length]`, or a `GenerateOutput` if `return_dict_in_generate` is set.
        """
        if model is not self.model:
            raise UnsupportedModelError("custom_generate=spec was given another model than the one spec wraps")
        past = model_kwargs.get("past_key_values")
        if past is not None and past.get_seq_length() > 0:
            raise UnsupportedOptionError("past_key_values is not supported: pass the whole conversation as input_ids")
        # Not a parameter of its own: transformers would then pass it twice.
        mask = model_kwargs.get("attention_mask")
        request = prepared_request(model, input_ids, mask, generation_config, logits_processor, stopping_criteria)
        run = self._begin(request, seed, draft_length)
        for _ in run.rounds():
            pass
        return run.output() if request.return_dict else run.output().sequences

    def unwrap(self) -> PreTrainedModel:
        """Give the model back and end this wrapper. The model needs no restoring: it was never changed.

        Raises:
            ClosedError: it was unwrapped before.
        """
        self._check_open()
        self._closed = True
        return self.model

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        generation_config: GenerationConfig | None,
        options: dict[str, Any],
    ) -> Request:
        self._check_open()
        inputs = options.pop("inputs", None)
        if input_ids is not None and inputs is not None:
            raise PromptError("pass the prompt once: as input_ids or as inputs")
        return read_request(
            self.model, inputs if input_ids is None else input_ids, attention_mask, generation_config, options
        )

    def _begin(self, request: Request, seed: int | None, draft_length: int | None) -> Generation:
        self._check_open()
        self._check_model()
        length = self._check_draft(self.draft_length if draft_length is None else draft_length)
        return Generation(self.model, self.adapter, request, self.draft, FixedLength(length), seed)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this wrapper was unwrapped; call selfspec.wrap(model) again")

    def _check_model(self) -> None:
        kernel = self.model.config._attn_implementation
        if kernel not in _ATTENTION_KERNELS:
            raise UnsupportedModelError(
                f"attention kernel {kernel!r} is not supported; load the model with attn_implementation='sdpa'"
            )
        if self.model.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.model.modules()):
            raise UnsupportedModelError("the model is in training mode with dropout; call model.eval() first")

    def _check_draft(self, draft_length: int) -> int:
        if self.draft is None:
            return 0
        if not isinstance(self.draft, Drafter):
            raise DraftConfigError(f"draft must be a drafter such as EarlyExit(layer=4), got {self.draft!r}")
        self.draft.check(len(self.adapter.decoder_layers(self.model)))
        if draft_length == 0:
            raise DraftConfigError("draft length must be at least 1; wrap with draft=None to decode plainly")
        return FixedLength(draft_length).length


class Generation:
    """One call under way: its state and what it has counted."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: Adapter,
        request: Request,
        draft: Drafter | None,
        control: FixedLength,
        seed: int | None,
    ) -> None:
        device = model.get_input_embeddings().weight.device
        batch = request.input_ids.shape[0]
        cache = SharedCache(
            depth=len(adapter.decoder_layers(model)),
            batch=batch,
            limit=max(request.lengths) + request.max_new_tokens,
            slack=control.length,
            device=device,
        )
        generator = torch.Generator(device)
        generator.manual_seed(int(torch.randint(2**62, ()).item()) if seed is None else seed)
        self.stats = Stats()
        self._request = request
        self._draft = draft
        self._control = control
        self._state = State(
            passes=Passes(model, adapter, cache),
            cache=cache,
            sampling=request.sampling,
            generator=generator,
            last=request.input_ids[:, -1:].to(device),
            committed=[[] for _ in range(batch)],
            live=[request.max_new_tokens > 0] * batch,
        )

    def rounds(self) -> Iterator[Round]:
        """Run to the end, round by round.

        Raises:
            NonFiniteLogitsError: after the last round, if a row ended for that reason.
        """
        yield from rounds(self._state, self._request, self._draft, self._control, TokenLevel(), self.stats)
        if self._state.failed:
            raise NonFiniteLogitsError(self.output(), tuple(sorted(self._state.failed)))

    def output(self) -> GenerateOutput:
        """What has been generated so far."""
        committed = self._state.committed
        longest = max(len(tokens) for tokens in committed)
        padded = [tokens + [self._request.pad] * (longest - len(tokens)) for tokens in committed]
        prompts = self._request.input_ids
        new = torch.tensor(padded, dtype=torch.long, device=prompts.device).reshape(len(padded), longest)
        return GenerateOutput(torch.cat([prompts, new], 1), tuple(len(tokens) for tokens in committed), self.stats)
