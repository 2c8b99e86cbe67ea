"""Planted bugs, those of earlier systems among them. Each must make the suite fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One bug.

    Attributes:
        name: what is wrong.
        file: where, from the root of the project.
        right: the text that stands there, once.
        wrong: what takes its place.
        tests: what must fail, as arguments of pytest.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


_JOINT = "tests/test_generate.py::test_samples_follow_the_exact_joint"
_MANY = "tests/test_exactness_more.py::test_many_samples_follow_the_exact_joint"
_OWN_Q = "tests/test_exactness_more.py::test_a_draft_is_drawn_from_the_q_it_is_scored_with"
_ROWS = "tests/test_exactness_more.py::test_rows_of_one_prompt_are_independent_samples"
_COUPLED = "tests/test_exactness_more.py::test_coupled_drafts_are_accepted_as_often_as_is_promised"
_GREEDY = "tests/test_generate.py::test_greedy_equals_stock_generate"
_RAGGED = "tests/test_generate.py::test_ragged_rows_equal_the_rows_alone"
_EXACT_LENGTH = "tests/test_generate.py::test_max_new_tokens_is_exact_to_the_token"
_EOS = "tests/test_generate.py::test_an_end_of_sequence_token_inside_an_accepted_run_ends_the_row"
_SEEDS = "tests/test_generate.py::test_a_seed_gives_the_same_tokens_and_another_seed_others"
_CACHE = "tests/test_cache.py"
_PROCESSORS = "tests/test_processing.py::test_greedy_equals_stock_generate_on_a_ragged_batch"
_PLACES = "tests/test_processing.py::test_places_of_rows_at_different_lengths_are_processed_with_their_own_prefixes"
_AS_GOOD = "tests/test_processing.py::test_a_draft_as_good_as_the_target_is_accepted_whole"
_CRITERIA = "tests/test_stopping.py::test_a_criterion_sees_each_token_once_and_ends_the_text_there"
_ENDED = "tests/test_ended_rows.py::test_greedy_rows_are_what_they_are_alone"
_NOISE = "tests/test_ended_rows.py::test_coupled_rows_keep_their_own_noise"
_PADDED_PAST = "tests/test_past.py::test_a_left_padded_batch_goes_on_from_its_cache"
_CONTROLLED = "tests/test_control.py::test_greedy_text_is_stock_text"
_GRAPHS = "tests/runtime/test_cuda_graphs.py"
_IN_STEP = "tests/test_in_step.py"
_TOKEN_PROOF = "tests/accept/test_token_level.py"
_BLOCK_PROOF = "tests/accept/test_block.py"

_TOKEN_LEVEL = "selfspec/accept/token_level.py"
_BLOCK = "selfspec/accept/block.py"
_ALONG_PATH = "selfspec/draft/along_path.py"
_LOOP = "selfspec/generate.py"
_JUDGE = "selfspec/judge.py"
_SEQUENTIAL = "selfspec/sequential.py"
_LOCKSTEP = "selfspec/lockstep.py"
_SAMPLING = "selfspec/sampling.py"
_SHARED_CACHE = "selfspec/cache.py"
_CONTROL = "selfspec/control.py"
_MASKS = "selfspec/masks.py"
_PROGRAMS = "selfspec/runtime/programs.py"
_TRACED = "selfspec/runtime/traced.py"
_LAYER_CALLS = "selfspec/runtime/layer_calls.py"
_COMPILED = "selfspec/runtime/compiled.py"
_CUDA_GRAPHS = "selfspec/runtime/cuda_graphs.py"
_PASSES = "selfspec/passes.py"
_GROUPED = "selfspec/grouped_queries.py"
_PATH = "selfspec/path.py"
_PROCESSING = "selfspec/processing.py"
_STOPPING = "selfspec/stopping.py"
_RECORD = "selfspec/record.py"
_GATE = "selfspec/gate.py"
_RECURRENT = "selfspec/recurrent.py"
_STATE = "selfspec/runtime/model_state.py"
_STALE = "tests/runtime/test_stale.py::test_programs_are_of_the_model_as_it_is"

CATALOGUE = (
    # Acceptance, token by token.
    Mutation(
        "swapped ratio: a draft token stands with chance q/p",
        _TOKEN_LEVEL,
        "(p_token / q.gather(-1, index)[..., 0]).clamp(max=1.0)",
        "(q.gather(-1, index)[..., 0] / p_token).clamp(max=1.0)",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "residual taken from p",
        _TOKEN_LEVEL,
        "residual = (p_next - q_next).clamp_min(0.0)",
        "residual = p_next",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "residual with the absolute difference",
        _TOKEN_LEVEL,
        "residual = (p_next - q_next).clamp_min(0.0)",
        "residual = (p_next - q_next).abs()",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "bonus token drawn from the residual of the last draft token",
        _TOKEN_LEVEL,
        "keep_p = (accepted == drafted)[:, None] | (residual.sum(-1, keepdim=True) == 0)",
        "keep_p = residual.sum(-1, keepdim=True) == 0",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "a residual that sums to 0 where p equals q is drawn from",
        _TOKEN_LEVEL,
        "keep_p = (accepted == drafted)[:, None] | (residual.sum(-1, keepdim=True) == 0)",
        "keep_p = (accepted == drafted)[:, None]",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "tokens after a rejected one are accepted",
        _TOKEN_LEVEL,
        "coins.long().cumprod(-1).sum(-1)",
        "coins.long().sum(-1)",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "the residual at the place before the rejected token",
        _TOKEN_LEVEL,
        "rejected = accepted.clamp(max=drafted - 1)",
        "rejected = (accepted - 1).clamp(min=0)",
        (_TOKEN_PROOF,),
    ),
    # Acceptance of the block.
    Mutation(
        "block: weights of a prefix grow beyond 1",
        _BLOCK,
        "(weights[-1] * ratio[:, position]).clamp(max=1.0)",
        "(weights[-1] * ratio[:, position])",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "block: the draft stands up to the first heads, not the last",
        _BLOCK,
        "(coins * places).amax(-1)",
        "coins.long().cumprod(-1).sum(-1)",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "block: the residual forgets the weight of the prefix",
        _BLOCK,
        "residual = _residual(weight, p_next, ",
        "residual = _residual(torch.ones_like(weight), p_next, ",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "block: the residual takes q of the place before",
        _BLOCK,
        "q[rows, accepted.clamp(max=drafted - 1)]",
        "q[rows, (accepted - 1).clamp(min=0)]",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "block: coins loaded without what a prefix has lost",
        _BLOCK,
        "left / (left + (1 - stands[:, :-1]))",
        "stands[:, :-1]",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "a relaxed rule says it is lossless",
        "selfspec/accept/relaxed.py",
        "lossless = False",
        "lossless = True",
        ("tests/accept/test_relaxed.py",),
    ),
    # What a draft token was drawn from.
    Mutation(
        "stale q: the distribution of the draft step before",
        _ALONG_PATH,
        "distributions.append(q)",
        "distributions.append(last if distributions else q); last = q",
        (_JOINT, _OWN_Q),
    ),
    Mutation(
        "an argmax draft scored with a softmax q",
        _ALONG_PATH,
        "token = state.sampling.draw(decided, state.generator)",
        "token = decided.argmax(-1)",
        (_OWN_Q,),
    ),
    Mutation(
        "draft tokens drawn at a temperature 10 % off the one they are scored with",
        _ALONG_PATH,
        "token = state.sampling.draw(decided, state.generator)",
        "token = state.sampling.draw(decided**1.1, state.generator)",
        (_OWN_Q,),
    ),
    Mutation(
        "a draft that overflowed is scored with NaN",
        _ALONG_PATH,
        "q = proper(state.sampling.probabilities(scores))",
        "q = state.sampling.probabilities(scores)",
        ("tests/test_generate.py", "-k", "not_finite"),
    ),
    Mutation(
        "a sampled draft judged as if q were one-hot: exact, and wasteful",
        _JUDGE,
        "q = None if sampling.decided else draft.q",
        "q = None",
        ("tests/draft/test_along_path.py",),
    ),
    Mutation(
        "a coupled draft takes its noise from the place before",
        _ALONG_PATH,
        "state.cache.positions(1) + 1",
        "state.cache.positions(1)",
        (_COUPLED,),
    ),
    # What p is and what is drawn from it.
    Mutation(
        "the bonus token drawn without temperature or filters",
        _JUDGE,
        "p = sampling.probabilities(scores)",
        "p = torch.cat([sampling.probabilities(scores)[:, :-1], logits[:, -1:].float().softmax(-1)], 1)",
        (_JOINT,),
    ),
    Mutation(
        "filters applied again to the residual",
        _JUDGE,
        "token = sampling.draw(rule.next(draft.tokens, q, decided, count), state.generator)",
        "again = rule.next(draft.tokens, q, decided, count).log()[:, None]; "
        "token = sampling.draw(sampling.probabilities(sampling.scores(again, Prefixes(state.text)))[:, 0], "
        "state.generator)",
        (_JOINT,),
    ),
    Mutation(
        "off by one row of logits: the token after the draft from the place before",
        _TOKEN_LEVEL,
        "p_next = p[rows, accepted]",
        "p_next = p[rows, (accepted - 1).clamp(min=0)]",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "off by one row of logits: every draft token judged by the row after its own",
        _LOOP,
        "return state.passes.logits(target.resumed_at(draft.resume.start), block, entering).logits",
        "return state.passes.logits(target.resumed_at(draft.resume.start), block, entering).logits.roll(-1, 1)",
        (_GREEDY,),
    ),
    Mutation(
        "acceptance and residual share their noise",
        _JUDGE,
        "noise = torch.rand((len(state.live), draft.length), generator=state.generator, "
        "dtype=p.dtype, device=p.device)",
        # In float64 the generator gives uniform numbers and exponential ones of the same bits.
        "noise = torch.rand((len(state.live), p.shape[-1]), generator=state.generator.clone_state(), "
        "dtype=torch.float64)[:, : draft.length].to(p.dtype)",
        (_JOINT, _MANY),
    ),
    Mutation(
        "every round throws the same coins",
        _JUDGE,
        "noise = torch.rand((len(state.live), draft.length), generator=state.generator,",
        "noise = torch.rand((len(state.live), draft.length), generator=torch.Generator().manual_seed(0),",
        (_JOINT, _MANY),
    ),
    Mutation(
        "all rows draw with the same noise",
        _SAMPLING,
        "torch.rand(total.shape, generator=generator, dtype=sums.dtype, device=sums.device) * total",
        "torch.rand((), generator=generator, dtype=sums.dtype, device=sums.device) * total",
        (_ROWS,),
    ),
    Mutation(
        "all rows of a coupled generation draw with the same noise",
        "selfspec/coupling.py",
        "key = _mixed(key + _GOLDEN * (rows + 1)[:, None])",
        "key = _mixed(key.expand(batch, 1))",
        (_ROWS,),
    ),
    Mutation(
        "the race for a draw is run with uniform noise, not exponential",
        _SAMPLING,
        "torch.empty_like(weights).exponential_(generator=generator)",
        "torch.empty_like(weights).uniform_(generator=generator)",
        ("tests/test_sampling.py",),
    ),
    Mutation(
        "a draw may fall on what has no weight",
        _SAMPLING,
        "torch.searchsorted(sums, places, right=True)",
        "torch.searchsorted(sums, places)",
        ("tests/test_sampling.py",),
    ),
    Mutation(
        "probabilities in the precision of the logits, not in float32",
        _PROCESSING,
        "scores = logits.float()\n        if not self.processors:",
        "scores = logits.clone()\n        if not self.processors:",
        ("tests/test_sampling.py",),
    ),
    Mutation(
        "the seed is not used",
        "selfspec/generation.py",
        "generator.manual_seed(seed)",
        "generator.seed()",
        (_SEEDS,),
    ),
    Mutation(
        "logits that are NaN are drawn from",
        _JUDGE,
        "finite &= logits.amax(-1).isfinite()",
        "finite = torch.ones_like(finite)",
        ("tests/test_generate.py", "-k", "not_finite"),
    ),
    # Where text ends.
    Mutation(
        "an end-of-sequence token inside an accepted run is not seen",
        _STOPPING,
        "return next((index + 1 for index, token in enumerate(run) if token in self.eos), len(run))",
        "return len(run)",
        (_EOS,),
    ),
    Mutation(
        "the end-of-sequence token itself is dropped",
        _STOPPING,
        "next((index + 1 for index, token",
        "next((index for index, token",
        (_EOS,),
    ),
    Mutation(
        "an accepted run overshoots max_new_tokens",
        _STOPPING,
        "min(self._first_eos(run), self.max_new_tokens - len(tokens))",
        "self._first_eos(run)",
        (_EXACT_LENGTH, "tests/test_generate.py", "tests/test_request.py"),
    ),
    Mutation(
        "generation stops a token short of max_new_tokens",
        _STOPPING,
        "return count >= self.max_new_tokens or",
        "return count >= self.max_new_tokens - 1 or",
        (_EXACT_LENGTH,),
    ),
    Mutation(
        "text that holds the pad id is taken for padding",
        "selfspec/request.py",
        "lengths = tuple(mask.sum(1).tolist())",
        "lengths = tuple((input_ids != (0 if pad is None else int(pad.flatten()[0]))).sum(1).tolist())",
        ("tests/test_generate.py", "-k", "pad_id"),
    ),
    Mutation(
        "a stopping criterion inside an accepted run is not heard",
        _STOPPING,
        "if verdicts[row]:",
        "if verdicts[row] and length == starts[row] + len(runs[row]):",
        (_CRITERIA,),
    ),
    Mutation(
        "stopping criteria see the accepted run whole, not token by token",
        _STOPPING,
        "self.criteria(ids[:, :length].contiguous(), so_far)",
        "self.criteria(ids, so_far)",
        (_CRITERIA,),
    ),
    Mutation(
        "text after a stop string is streamed and returned",
        _JUDGE,
        "tokens=cut[row][:end]",
        "tokens=cut[row]",
        (_CRITERIA,),
    ),
    # What logits processors see.
    Mutation(
        "logits processors are given the last token alone",
        _PROCESSING,
        "called(self.processors, ids[:, :length],",
        "called(self.processors, ids[:, length - 1 : length],",
        (_PROCESSORS,),
    ),
    Mutation(
        "penalties count draft tokens that come later, rejected ones among them",
        _PROCESSING,
        "called(self.processors, ids[:, :length],",
        "called(self.processors, ids,",
        (_PROCESSORS,),
    ),
    Mutation(
        "every place is processed with the prefix of the first",
        _PROCESSING,
        "called(self.processors, ids[:, :length],",
        "called(self.processors, ids[:, : min(first)],",
        (_PROCESSORS, _PLACES),
    ),
    Mutation(
        "a draft step's processors do not see the draft so far",
        _ALONG_PATH,
        "Prefixes(state.text, tokens)",
        "Prefixes(state.text)",
        (_AS_GOOD,),
    ),
    Mutation(
        "drafts are not processed at all",
        _ALONG_PATH,
        "scores = state.sampling.scores(step.logits, Prefixes(state.text, tokens))",
        "scores = step.logits.float()",
        (_AS_GOOD,),
    ),
    Mutation(
        "a draft goes on after the end of the text, and processors see it",
        _PROCESSING,
        "return next((index for index, token in enumerate(run) if token in self.eos), len(run))",
        "return len(run)",
        ("tests/test_processing.py", "-k", "beyond"),
    ),
    Mutation(
        "a processor that reads the prefix is taken for a warper",
        _PROCESSING,
        "if all(type(processor) in _WARPERS for processor in processors):",
        "if all(isinstance(processor, tuple(_WARPERS)) for processor in processors):",
        ("tests/test_request.py", "-k", "users_warper"),
    ),
    # Scores that are returned.
    Mutation(
        "scores of the place before a token are returned as its own",
        _RECORD,
        "self._steps[starts[row] + place][row] = values[index, place]",
        "self._steps[starts[row] + place][row] = values[index, place - 1]",
        ("tests/test_record.py",),
    ),
    Mutation(
        "scores of tokens after the end of a row are returned",
        _RECORD,
        "if length <= index]",
        "if length < index]",
        ("tests/test_record.py",),
    ),
    Mutation(
        "scores are returned as logits",
        "selfspec/state.py",
        "self.logits.keep(logits, self.text.rows, starts, counts)",
        "self.logits.keep(scores, self.text.rows, starts, counts)",
        ("tests/test_record.py",),
    ),
    # Keys and values of an earlier turn.
    Mutation(
        "a padded row takes up the keys and values of its padding",
        "selfspec/past.py",
        "slots = [row.nonzero().flatten() for row in mask[:, : past_length(past)]]",
        "slots = [torch.arange(past_length(past)) for row in mask]",
        (_PADDED_PAST,),
    ),
    Mutation(
        "the last run of a row is missing from the cache that is returned",
        _LOOP,
        "state.cache.commit([len(rows[row].tokens) for",
        "state.cache.commit([len(rows[row].tokens) * state.live[row] for",
        ("tests/test_past.py",),
    ),
    # Rows that have ended.
    Mutation(
        "rows that are left choose with the noise of those that ended",
        "selfspec/sampling.py",
        "self._coupling and self._coupling.narrowed(rows)",
        "self._coupling",
        (_NOISE,),
    ),
    Mutation(
        "the cache keeps its first rows in place of those that are left",
        "selfspec/state.py",
        "self.cache.narrow(kept)",
        "self.cache.narrow(range(len(kept)))",
        (_ENDED,),
    ),
    Mutation(
        "ended rows are run to the last",
        "selfspec/state.py",
        "2 * len(kept) > len(running)",
        "True",
        (_ENDED,),
    ),
    # The cache.
    Mutation(
        "the draft's tokens are not all rolled back",
        _ALONG_PATH,
        "state.cache.rollback(len(tokens))",
        "state.cache.rollback(len(tokens) - 1)",
        (_GREEDY,),
    ),
    Mutation(
        "the cursor is one too far after a rejection",
        _LOOP,
        "state.cache.commit([len(rows[row].tokens) for",
        "state.cache.commit([len(rows[row].tokens) + (rows[row].accepted < draft.length) for",
        (_GREEDY,),
    ),
    Mutation(
        "the cursor is one behind after a rejection",
        _LOOP,
        "state.cache.commit([len(rows[row].tokens) for",
        "state.cache.commit([max(len(rows[row].tokens) - (rows[row].accepted < draft.length), 0) for",
        (_GREEDY,),
    ),
    Mutation(
        "positions are one off",
        _SHARED_CACHE,
        "return self._cursors.slots(width).clamp(",
        "return (self._cursors.slots(width) + 1).clamp(",
        (_GREEDY, "tests/adapters/test_adapters.py"),
    ),
    Mutation(
        "ragged rows are written where the longest one stands",
        _SHARED_CACHE,
        "return cursor[:, None] + torch.arange",
        "return cursor[:, None].amax(0, keepdim=True).expand(len(self.lengths), 1) + torch.arange",
        (_RAGGED,),
    ),
    Mutation(
        "the mask of ragged rows admits the token after a query",
        _MASKS,
        "pattern(row, head, slots[row, query], key)",
        "pattern(row, head, slots[row, query] + 1, key)",
        (_RAGGED,),
    ),
    Mutation(
        "the mask of ragged rows admits rejected tokens of other rounds",
        _MASKS,
        "pattern(row, head, slots[row, query], key)",
        "pattern(row, head, slots[:, query].amax(), key)",
        (_RAGGED,),
    ),
    Mutation(
        "a program is trusted whatever bits it gives",
        _PROGRAMS,
        "if not self._runtime.agree(given.flat(), expected.flat()):",
        "if False:",
        ("tests/runtime/test_programs.py::test_what_gives_other_bits_or_fails_is_never_used",),
    ),
    Mutation(
        "keys and values stay as a wrong program left them",
        _PROGRAMS,
        'candidate.refuse("it gave something else than the stock modules")\n            return stock()',
        'candidate.refuse("it gave something else than the stock modules")\n            return expected',
        ("tests/runtime/test_programs.py::test_what_writes_other_keys_and_values_does_no_harm",),
    ),
    Mutation(
        "programs outlive the weights they were made of",
        _PROGRAMS,
        " or not current.state.holds()",
        "",
        ("tests/runtime/test_programs.py::test_other_weights_are_noticed",),
    ),
    Mutation(
        "programs know no window",
        _PASSES,
        "windowed = self._window is not None and",
        "windowed = self._window == 0 and",
        ("tests/runtime/test_programs.py::test_greedy_text_is_the_stock_models",),
    ),
    Mutation(
        "layers share a function though one of them uses its number",
        _TRACED,
        "if str(first) == str(last):",
        "if True:",
        ("tests/runtime/test_layer_calls.py::test_a_layer_that_uses_its_number_is_no_others",),
    ),
    Mutation(
        "layers that attend otherwise share a function",
        _LAYER_CALLS,
        "shapes, self._structure())",
        "shapes)",
        ("tests/runtime/test_layer_calls.py::test_layers_that_attend_otherwise_are_not",),
    ),
    Mutation(
        "a graph reads the tokens it was captured with",
        _CUDA_GRAPHS,
        "            static.copy_(tensor)\n",
        "            pass\n",
        (f"{_GRAPHS}::test_greedy_text_is_the_stock_models",),
    ),
    Mutation(
        "a graph's outputs are handed out as they lie",
        _CUDA_GRAPHS,
        "tuple(output.clone() for output in self.recording.outputs)",
        "tuple(self.recording.outputs)",
        (f"{_GRAPHS}::test_greedy_text_is_the_stock_models",),
    ),
    Mutation(
        "a graph is used for a cache that lies elsewhere",
        _CUDA_GRAPHS,
        "(tensor.data_ptr(), tensor.shape) for tensor in memory",
        "(0, tensor.shape) for tensor in memory",
        (f"{_GRAPHS}::test_another_generation_has_a_cache_elsewhere",),
    ),
    Mutation(
        "a graph is trusted whatever bits it gives",
        _CUDA_GRAPHS,
        "if not equal(graph.run(inputs), expected):",
        "if False:",
        (f"{_GRAPHS}::test_what_cannot_be_captured_is_run_by_the_stock_modules",),
    ),
    Mutation(
        "a graph keeps the cache it was captured on",
        _CUDA_GRAPHS,
        "self._graphs[key] = graph\n",
        "self._graphs[key] = graph\n            self._memory = memory\n",
        (f"{_GRAPHS}::test_a_cache_is_free_when_its_generation_ends",),
    ),
    Mutation(
        "the last token sees what stands behind it in its bucket",
        _MASKS,
        "is_last = not padded and ",
        "is_last = ",
        (f"{_GRAPHS}::test_greedy_text_is_the_stock_models",),
    ),
    Mutation(
        "attention with shared key heads forgets its mask",
        _GROUPED,
        "query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True",
        "query, key, value, scale=scaling, enable_gqa=True",
        ("tests/test_grouped_queries.py",),
    ),
    Mutation(
        "growing the cache loses what it held",
        _SHARED_CACHE,
        "new[:, :, : old.shape[2]] = old",
        "new[:, :, : old.shape[2]] = 0",
        (_CACHE,),
    ),
    Mutation(
        "prefill reads a padded row from its padding on",
        _LOOP,
        "request.read[row, columns[row].nonzero().flatten()[-1 - count : -1]]",
        "request.read[row, :count]",
        (_RAGGED,),
    ),
    Mutation(
        "NaN that a draft token left in the cache stays there",
        _LOOP,
        "state.cache.scrub([index for index, row in enumerate(state.text.rows) if row in state.doubted])",
        "pass",
        ("tests/test_generate.py", "-k", "spoils"),
    ),
    # Recurrent layers.
    Mutation(
        "a pass writes into the recurrent state that it would go back to",
        _RECURRENT,
        "Snapshot({}, {}) if snapshot is None else snapshot.mapped(torch.clone)",
        "Snapshot({}, {}) if snapshot is None else snapshot",
        ("tests/test_recurrent.py", "tests/adapters/test_hybrids.py"),
    ),
    Mutation(
        "all rows settle at the recurrent state of the first",
        _RECURRENT,
        "for count in tokens])}",
        "for count in [tokens[0]] * len(tokens)])}",
        ("tests/test_recurrent.py",),
    ),
    Mutation(
        "recurrent layers read what stands behind a shorter prompt",
        "selfspec/passes.py",
        "if not self._cache.empty or any(count < tokens.shape[1] for count in counts):",
        "if not self._cache.empty:",
        ("tests/adapters/test_hybrids.py",),
    ),
    # Paths and gates.
    Mutation(
        "an early exit runs one sublayer more",
        _PATH,
        "if sublayer >= end)",
        "if sublayer > end)",
        ("tests/test_path.py",),
    ),
    Mutation(
        "verification resumes at the last skipped sublayer, not the first",
        _PATH,
        "first = min(self.skipped, default=None)",
        "first = max(self.skipped, default=None)",
        (_GREEDY, "tests/test_path.py"),
    ),
    Mutation(
        "the states of the last draft token come first",
        _LOOP,
        "[draft.resume.states, tail]",
        "[tail, draft.resume.states]",
        (_GREEDY,),
    ),
    Mutation(
        "what was exact is computed again",
        _LOOP,
        "if draft.resume is None:",
        "if True:",
        ("tests/draft/test_along_path.py",),
    ),
    Mutation(
        "a skipped sublayer gives its input in place of nothing",
        _GATE,
        'torch.zeros_like(hidden) if gives == "zeros" else hidden',
        "hidden",
        ("tests/test_gate.py",),
    ),
    Mutation(
        "gates are put on the model's own modules",
        "selfspec/twin.py",
        "    copy: nn.Module = object.__new__(type(module))\n",
        "    copy: nn.Module = module\n",
        ("tests/test_wrapped.py",),
    ),
    # How long drafts are, and look-ups.
    Mutation(
        "cursors stay ahead where a draft ends early",
        _ALONG_PATH,
        "state.cache.rollback(len(tokens))",
        "state.cache.rollback(len(tokens) - (len(tokens) < length))",
        (_CONTROLLED,),
    ),
    Mutation(
        "useless drafts are never given up",
        _CONTROL,
        "self._lost = max(self._lost + cost - gained,",
        "self._lost = min(self._lost + cost - gained,",
        ("tests/test_control.py",),
    ),
    # Rows that are kept in step.
    Mutation(
        "a row that was cut goes on from the token that was cut off last",
        _JUDGE,
        "accepted.count.clamp(max=most)[:, None]",
        "accepted.count[:, None]",
        (_IN_STEP,),
    ),
    Mutation(
        "a row that was cut goes on from the target's token after what was cut off",
        _JUDGE,
        "own = accepted.finite & (accepted.count < most)",
        "own = accepted.finite",
        (_IN_STEP,),
    ),
    Mutation(
        "a row that ends is not cut: ends come too often",
        _JUDGE,
        "cut = [run[:most] for run in runs]",
        "cut = [run if set(run) & stopping.eos else run[:most] for run in runs]",
        (f"{_IN_STEP}::test_samples_follow_the_exact_joint",),
    ),
    Mutation(
        "a row in doubt that has no token stalls the others",
        _LOCKSTEP,
        "for run in runs if run), default=whole)",
        "for run in runs), default=whole)",
        (f"{_IN_STEP}::test_a_row_that_is_not_finite_does_not_stall_the_others",),
    ),
    Mutation(
        "rows are in step for ever",
        _CONTROL,
        "            self._in_step = False\n",
        "            self._in_step = True\n",
        ("tests/test_control.py", _IN_STEP),
    ),
    Mutation(
        "what was dropped to stay in step counts as gained",
        _CONTROL,
        "gained = committed + dropped if self.is_new else committed",
        "gained = committed + dropped",
        ("tests/test_control.py",),
    ),
    Mutation(
        "a row that falls behind for good is hidden by the mean",
        _CONTROL,
        "return mean - (mean - min(gained)) * self._rounds",
        "return mean - 0 * self._rounds",
        ("tests/test_control.py::test_a_batch_whose_hindmost_row_gains_nothing_gains_nothing",),
    ),
    Mutation(
        "the end of a row counts as a loss",
        _CONTROL,
        "before = self._place(going)\n",
        "before = self._place(range(len(tokens)))\n",
        ("tests/test_control.py::test_the_end_of_a_row_is_no_gain_and_no_loss",),
    ),
    Mutation(
        "a draft that could hardly pay is tried at once",
        _CONTROL,
        "if at_risk > 0 and not self.gains:",
        "if at_risk < 0 and not self.gains:",
        ("tests/test_control.py::test_a_draft_that_could_hardly_pay_is_not_tried_before_its_price_is_saved_up",),
    ),
    Mutation(
        "a batch looks up as much as a row",
        _CONTROL,
        "        if self._costs.rows == 1:\n            return self._longest\n",
        "        if share == 1:\n            return self._longest\n",
        ("tests/test_control.py::test_one_row_looks_up_all_it_may_and_a_batch_as_much_as_pays",),
    ),
    Mutation(
        "ended rows have a say in how long drafts are",
        _CONTROL,
        "any(live and confidence >= self._threshold",
        "any(confidence >= self._threshold",
        ("tests/test_control.py",),
    ),
    Mutation(
        "the end of a text is a place before itself",
        "selfspec/suffix_index.py",
        "            self._tokens.append(token)\n",
        "            self._tokens.append(token)\n"
        "            self._ends[tuple(self._tokens[-self._sizes[-1]:])] = len(self._tokens)\n",
        ("tests/test_suffix_index.py",),
    ),
    Mutation(
        "a look-up takes in what was generated only once",
        "selfspec/state.py",
        "index.extend(self.text.tokens_from(row, len(index)))",
        "index.extend(self.text.tokens_from(row, 0) if len(index) == 0 else ())",
        ("tests/draft/test_prompt_lookup.py",),
    ),
    # Linears of few rows.
    Mutation(
        "blocks of few rows lose the bias",
        "selfspec/few_rows.py",
        "        product += linear.bias\n",
        "        product += 0\n",
        ("tests/test_few_rows.py",),
    ),
    Mutation(
        "with AVX-512 wide layers go on with the weight on the left",
        "selfspec/few_rows.py",
        "return 8 <= rows <= 48",
        "return 8 <= rows <= 64",
        ("tests/test_few_rows.py::test_the_weight_is_on_the_left_where_that_was_the_faster_way",),
    ),
    Mutation(
        "a program compared over one number of slots runs over all",
        "selfspec/runtime/programs.py",
        "self.lengths.count(length) >= _SAME",
        "len(self.lengths) >= _SAME",
        (
            "tests/runtime/test_programs.py"
            "::test_passes_that_always_see_as_many_slots_are_compared_a_few_times_and_for_no_other_number",
        ),
    ),
    Mutation(
        "a batch looks up as soon as one row has a match",
        "selfspec/control.py",
        "return best if share == 1 or self._speed(0, best, share) > 1 else 0",
        "return best",
        ("tests/test_control.py::test_rows_with_a_match_must_be_enough_to_pay_for_those_without",),
    ),
    # Costs in batches.
    Mutation(
        "a draft costs in every batch what it costs one row",
        "selfspec/control.py",
        "self._by_rows.in_batch(len(live))",
        "self._by_rows.in_batch(1)",
        ("tests/test_control.py::test_what_a_draft_costs_in_a_batch_is_what_was_measured_there",),
    ),
    Mutation(
        "between two sizes of batches costs lie on a line over rows",
        "selfspec/costs.py",
        "math.log(rows / below.rows) / math.log(above.rows / below.rows)",
        "(rows - below.rows) / (above.rows - below.rows)",
        ("tests/test_costs.py::test_between_sizes_of_batches_costs_lie_on_a_line_over_logarithms",),
    ),
    Mutation(
        "rows out of step are timed the wrong way round",
        "selfspec/measure/costs.py",
        "seconds[id(behind)] / seconds[id(alike)]",
        "seconds[id(alike)] / seconds[id(behind)]",
        ("tests/measure/test_measured_costs.py::test_rows_at_different_places_are_timed_beside_rows_that_stand_alike",),
    ),
    Mutation(
        "in other batches every draft costs what a look-up does",
        "selfspec/calibrate/candidates.py",
        "measured.of(PLAIN if self.path is None else draft_name(self.path))",
        "measured.of(PLAIN)",
        ("tests/calibrate/test_calibrate.py::test_what_was_chosen_is_measured_in_batches_of_other_sizes",),
    ),
    Mutation(
        "batches in which a draft lost are drafted in",
        "selfspec/plan.py",
        "return self if self.most_rows is None or rows <= self.most_rows else Choice(None)",
        "return self",
        ("tests/calibrate/test_calibrate.py::test_batches_in_which_drafts_lose_are_decoded_plainly",),
    ),
    # Compiled passes.
    Mutation(
        "a compiled pass is trusted whatever it gives",
        _COMPILED,
        "return bool(error <= eps**0.5 * size)",
        "return True",
        ("tests/runtime/test_compiled.py::test_what_gives_something_else_is_never_used",),
    ),
    Mutation(
        "a compiled pass runs over sizes that it was not compiled for",
        _COMPILED,
        "        if min(sizes) < _SMALLEST:\n            return False\n",
        "        return True\n",
        ("tests/runtime/test_compiled.py::test_sizes_that_a_pass_was_not_compiled_for_are_told",),
    ),
    Mutation(
        "a pass is compiled for the number of slots it was first seen with",
        _COMPILED,
        "DimDynamic.DYNAMIC if index == dim",
        "DimDynamic.STATIC if index == dim",
        ("tests/runtime/test_compiled.py::test_one_graph_serves_any_number_of_slots_and_alike_layers",),
    ),
    Mutation(
        "compiled layers share a graph though one of them uses its number",
        _COMPILED,
        "if first.code == last.code:",
        "if True:",
        ("tests/runtime/test_compiled.py::test_a_layer_that_uses_its_number_is_no_others",),
    ),
    # Packed weights.
    Mutation(
        "packed layers lose the bias",
        "selfspec/packed.py",
        "_linear_pointwise(states, weight, bias, ",
        "_linear_pointwise(states, weight, None, ",
        ("tests/test_packed.py",),
    ),
    Mutation(
        "programs keep the packed weights of another pass",
        "selfspec/runtime/held_weights.py",
        "self._put(tensors)\n",
        "pass\n",
        ("tests/test_packed.py",),
    ),
    Mutation(
        "unpacked weights ask for no gradient",
        "selfspec/packed.py",
        "self._put(self.weight.to_dense(), needed)",
        "self._put(self.weight.to_dense())",
        ("tests/test_packed.py",),
    ),
    # Processors and criteria with memory.
    Mutation(
        "processors with memory are asked for whole blocks",
        _PROCESSING,
        'return type(processor) in _STATELESS or getattr(processor, "stateless", False) is True',
        "return True",
        ("tests/test_sequential.py",),
    ),
    Mutation(
        "what a draft told a processor is not rolled back",
        _PROCESSING,
        "if calls and _can_roll_back(processor):",
        "if False:",
        ("tests/test_sequential.py",),
    ),
    Mutation(
        "a criterion with memory is shown rows filled up with padding",
        "selfspec/generation.py",
        "lockstep=request.sampling.in_order or request.stopping.stateful,",
        "lockstep=request.sampling.in_order,",
        ("tests/test_sequential.py", "-k", "criteria"),
    ),
    Mutation(
        "a place is judged in order though a draft token spoiled it",
        _SEQUENTIAL,
        "if draft.length and broken:",
        "if False:",
        ("tests/test_sequential.py", "-k", "spoils"),
    ),
    Mutation(
        "a row that rejects does not end the round for the others",
        _SEQUENTIAL,
        "if not all(row.ended or row.accepted > place for row in rows.values()):",
        "if not any(row.ended or row.accepted > place for row in rows.values()):",
        ("tests/test_sequential.py", "-k", "criteria or memory"),
    ),
    Mutation(
        "recovered tokens of a draft judged in order are drawn from p",
        _SEQUENTIAL,
        "own = sampling.draw(rule.next(token, q, p_rule, torch.zeros_like(accepted)), state.generator)",
        "own = sampling.draw(decided[:, 0], state.generator)",
        ("tests/test_sequential.py", "-k", "joint"),
    ),
    # Files and pages.
    Mutation(
        "a recipe is written between quotes and not by repr",
        "selfspec/recipe.py",
        "recipe=repr(json.dumps(asdict(self)))",
        'recipe=f\'"""{json.dumps(asdict(self))}"""\'',
        ("tests/test_saved.py::test_a_draft_of_any_name_is_saved_as_code_that_runs",),
    ),
    Mutation(
        "names in tables of a report are markup",
        "selfspec/bench/markdown.py",
        "_line(map(escaped, row))",
        "_line(row)",
        ("tests/bench_/test_figures.py::test_names_change_nothing_of_the_page",),
    ),
    Mutation(
        "logits of a draft are the full model's",
        "selfspec/verify/pruned.py",
        "path = draft.path(depth)",
        "path = Path.full(depth)",
        ("tests/verify/test_pruned.py",),
    ),
    Mutation(
        "the page on adapters compares the pruned model with itself",
        "docs/your_own_adapter.md",
        "draft_logits(model, draft, ids, block=6, adapter=adapter)",
        "pruned_logits(model, pruned, ids, block=6)",
        ("tests/adapters/test_your_own_adapter.py",),
    ),
    # Wrappers, and the models inside those of other libraries.
    Mutation(
        "a deep copy of a wrapper is a wrapper of another model",
        "selfspec/wrapped.py",
        "        return self\n\n    def __repr__",
        "        other = copy(self)\n        other.model = copy(self.model)\n        return other\n\n    def __repr__",
        ("tests/test_wrapped.py::test_options_that_are_copied_deeply_name_the_same_wrapper",),
    ),
    Mutation(
        "activations that are rounded over a whole pass are drafted for",
        "selfspec/stock.py",
        "is not torch.float16",
        "is torch.float16",
        ("tests/test_stock.py::test_dynamic_quantisation_to_8_bits_is_refused",),
    ),
    Mutation(
        "a PEFT model is wrapped without its adapter",
        "selfspec/stock.py",
        '    return tuner.get_submodule("model")\n',
        "    return tuner.unload()\n",
        ("-m", "clients", "tests/clients/test_peft.py::test_a_wrapped_adapter_gives_its_own_text"),
    ),
    Mutation(
        "a soft prompt is left out without a word",
        "selfspec/stock.py",
        "    if isinstance(tuner, PreTrainedModel):\n",
        "    if isinstance(tuner, PreTrainedModel):\n        return tuner\n    if False:\n",
        ("-m", "clients", "tests/clients/test_peft.py::test_a_soft_prompt_is_no_part_of_the_model"),
    ),
    # Prompts that are no tokens, and caches of states.
    Mutation(
        "a soft prompt is dropped",
        "selfspec/first_inputs.py",
        "if prepare is None or getattr(",
        "if True or getattr(",
        ("tests/test_first_inputs.py::test_a_soft_prompt_is_read",),
    ),
    Mutation(
        "embeddings are ignored where ids stand beside them",
        "selfspec/request.py",
        "if embeddings is not None else inputs[",
        "if embeddings is not None and not input_ids.numel() else inputs[",
        ("tests/test_embeddings.py::test_ids_beside_embeddings_are_the_text_that_is_added_to",),
    ),
    Mutation(
        "the last embedding of a prompt is read as a token",
        "selfspec/generation.py",
        "opening=request.read[:, -1:].to(device) if request.embeddings else None,",
        "opening=None,",
        ("tests/test_embeddings.py::test_embeddings_alone_give_new_tokens_alone",),
    ),
    Mutation(
        "padding between a prefix and the text counts towards windows",
        "selfspec/options.py",
        'counts = inputs.get("position_ids") is None or smallest_window(config) is not None',
        'counts = inputs.get("position_ids") is None',
        ("tests/test_first_inputs.py::test_padding_that_would_count_as_text_is_refused",),
    ),
    Mutation(
        "any positions are taken for those of the mask",
        "selfspec/options.py",
        "    return bool(((position_ids.to(mask.device) == expected)",
        "    return True or bool(((position_ids.to(mask.device) == expected)",
        ("tests/test_embeddings.py::test_other_positions_are_refused",),
    ),
    Mutation(
        "a cache that comes back has columns that a shorter row has not filled",
        "selfspec/past.py",
        "length = min(int(row[-1])",
        "length = max(int(row[-1])",
        ("tests/test_past.py::test_rows_that_ended_apart_go_on_from_what_all_have_filled",),
    ),
    Mutation(
        "states of a past are not taken up",
        "selfspec/past.py",
        "if isinstance(own, RecurrentLayer) and any(_has_states(layer)):",
        "if isinstance(own, RecurrentLayer) and False:",
        ("tests/adapters/test_recurrent_pasts.py::test_a_chat_goes_on",),
    ),
    Mutation(
        "a prompt is read from empty states though a past was taken up",
        "selfspec/passes.py",
        "if not self._cache.empty or any(",
        "if any(self._cache.lengths) or any(",
        ("tests/adapters/test_recurrent_pasts.py::test_a_chat_goes_on",),
    ),
    # Bad input.
    Mutation(
        "slack is as long as the control allows, however few tokens are wanted",
        "selfspec/generation.py",
        "slack=min(control.longest, request.stopping.max_new_tokens)",
        "slack=control.longest",
        ("tests/test_bad_input.py::test_slack_is_no_longer_than_what_is_left_to_generate",),
    ),
    Mutation(
        "masks of any number mean what 1 means",
        "selfspec/prompt.py",
        "if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):",
        "if False:",
        ("tests/test_bad_input.py", "-k", "mask"),
    ),
    Mutation(
        "values of sampling options are not looked at",
        "selfspec/option_values.py",
        'if value_of("do_sample"):',
        "if False:",
        ("tests/test_bad_input.py", "-k", "top_p or eta_cutoff"),
    ),
    Mutation(
        "token ids beyond the vocabulary are taken",
        "selfspec/option_values.py",
        "0 <= int(value) < scope.vocabulary",
        "0 <= int(value)",
        ("tests/test_bad_input.py", "-k", "suppress_tokens or bad_words"),
    ),
    Mutation(
        "what a custom_generate is handed is not looked at",
        "selfspec/request.py",
        "check_values(lambda name: getattr(generation_config, name, None), _scope(model, input_ids))",
        "pass",
        ("tests/test_bad_input.py", "-k", "lets_through"),
    ),
    # Programs that outlive what they were recorded of.
    Mutation(
        "programs outlive a change of a module's attributes",
        _STATE,
        "            self._follow(vars(module), self._constants)\n",
        "",
        (f"{_STALE}[scaling-traced]",),
    ),
    Mutation(
        "programs outlive a patch of a class",
        _STATE,
        "            self._contents.append(vars(kind).values())\n",
        "            pass\n",
        (f"{_STALE}[class: mlp-traced]",),
    ),
    Mutation(
        "programs outlive hooks of all modules",
        _STATE,
        "(*GLOBAL_HOOKS, *code.mappings)",
        "code.mappings",
        (f"{_STALE}[hook of all-traced]",),
    ),
    Mutation(
        "programs outlive other strides of a weight",
        _STATE,
        "tensor.shape, tensor.stride(), ",
        "tensor.shape, ",
        (f"{_STALE}[strides of a weight-traced]",),
    ),
    Mutation(
        "programs outlive a function that a kernel library replaced",
        _STATE,
        "for space, names in code.names.values()]",
        "for space, names in ()]",
        (f"{_STALE}[function: rotary-traced]",),
    ),
    Mutation(
        "what is computed of buffers is recorded as it was",
        "selfspec/runtime/traced.py",
        "_jit_pass_constant_propagation_immutable_types(graph)",
        "_jit_pass_constant_propagation(graph)",
        (f"{_STALE}[buffers in place-traced]",),
    ),
    Mutation(
        "a model changed within a generation is recorded as the one before",
        "selfspec/runtime/programs.py",
        "        if not self.state.holds():\n            return stock()\n",
        "",
        ("tests/runtime/test_stale.py::test_what_is_changed_within_a_generation_is_recorded_by_none",),
    ),
    Mutation(
        "programs run where a function mode should see every operation",
        "selfspec/runtime/recordable.py",
        "any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())",
        "False",
        ("tests/runtime/test_stale.py::test_a_function_mode_sees_every_pass",),
    ),
    Mutation(
        "views compute linear layers though their class was patched",
        "selfspec/few_rows.py",
        " or not _runs_torchs_product()",
        "",
        ("tests/runtime/test_stale.py::test_views_are_of_the_model_as_it_is[class: linear]",),
    ),
    Mutation(
        "views attend by the stock kernel though another took its name",
        "selfspec/grouped_queries.py",
        " and _runs_stock_kernel(module)",
        "",
        ("tests/runtime/test_stale.py::test_views_are_of_the_model_as_it_is[kernel registered]",),
    ),
    # What processors and criteria with memory are shown.
    Mutation(
        "a processor with memory is called once more after all rows have ended",
        _SEQUENTIAL,
        "if all(row.ended for row in rows.values()):",
        "if not rows:",
        ("tests/test_remembering.py", "-k", "calls_and_text and both"),
    ),
    Mutation(
        "scores of places judged in order are kept at the first place of the round",
        _SEQUENTIAL,
        "starts[number] += len(row.tokens) - (number in grown)",
        "starts[number] += 0",
        ("tests/test_remembering.py", "-k", "scores_asked"),
    ),
    # What a prompt shows of a draft.
    Mutation(
        "the target is held against itself on the prompt",
        "selfspec/evidence.py",
        "for each in (drafted.logits, logits))",
        "for each in (logits, logits))",
        ("tests/test_evidence.py::test_evidence_is_the_exit_beside_the_target",),
    ),
    Mutation(
        "a draft that is worth nothing on the prompt is tried all the same",
        _CONTROL,
        "if self._on_prompt is None or self._prospects.pays(self._on_prompt):",
        "if self._on_prompt is None or self._on_prompt >= 0:",
        ("tests/test_evidence.py::test_a_draft_that_is_worth_nothing_on_the_prompt_is_not_tried_in_a_short_text",),
    ),
)
