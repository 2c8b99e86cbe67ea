"""Planted bugs, those of earlier systems among them. Each must make the suite fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One bug.

    It is anchored by names and syntax: neither the file, nor white space, line breaks, comments and quotes matter. In
    `right` and `wrong` the names `_1` to `_9` are placeholders: each matches any expression, which `wrong` may repeat.

    Attributes:
        name: what is wrong.
        at: the function, class or constant that has the bug, by its dotted name (`Class.method`); or a page of docs/,
            by the name of its file, where `right` is matched as text.
        right: the code that is there, once: an expression, or statements that follow each other.
        wrong: what takes its place.
        tests: what must fail: functions (`test_name`, `test_name[parameters]`), files (`test_file.py`) or, where two
            files have a function of that name, both (`test_file.py::test_name`); and options of pytest.
    """

    name: str
    at: str
    right: str
    wrong: str
    tests: tuple[str, ...]


_JOINT = "test_generate.py::test_samples_follow_the_exact_joint"
_MANY = "test_many_samples_follow_the_exact_joint"
_OWN_Q = "test_a_draft_is_drawn_from_the_q_it_is_scored_with"
_ROWS = "test_rows_of_one_prompt_are_independent_samples"
_COUPLED = "test_coupled_drafts_are_accepted_as_often_as_is_promised"
_GREEDY = "test_greedy_equals_stock_generate"
_RAGGED = "test_ragged_rows_equal_the_rows_alone"
_EXACT_LENGTH = "test_max_new_tokens_is_exact_to_the_token"
_EOS = "test_an_end_of_sequence_token_inside_an_accepted_run_ends_the_row"
_SEEDS = "test_a_seed_gives_the_same_tokens_and_another_seed_others"
_CACHE = "test_shared_cache.py"
_PROCESSORS = "test_greedy_equals_stock_generate_on_a_ragged_batch"
_PLACES = "test_places_of_rows_at_different_lengths_are_processed_with_their_own_prefixes"
_AS_GOOD = "test_a_draft_as_good_as_the_target_is_accepted_whole"
_CRITERIA = "test_a_criterion_sees_each_token_once_and_ends_the_text_there"
_ENDED = "test_greedy_rows_are_what_they_are_alone"
_NOISE = "test_coupled_rows_keep_their_own_noise"
_PADDED_PAST = "test_a_left_padded_batch_goes_on_from_its_cache"
_CONTROLLED = "test_control.py::test_greedy_text_is_stock_text"
_IN_STEP = "test_lockstep.py"
_TOKEN_PROOF = "test_token_level.py"
_BLOCK_PROOF = "test_block.py"
_TREE_PROOF = "test_trees.py"

CATALOGUE = (
    # Acceptance, token by token.
    Mutation(
        "swapped ratio: a draft token is accepted with chance q/p",
        "_chances",
        "p_token / probs.gather(-1, index)[..., 0]",
        "probs.gather(-1, index)[..., 0] / p_token",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "residual taken from p",
        "_less_q",
        "(p - q).clamp_min(0.0)",
        "p",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "residual with the absolute difference",
        "_less_q",
        "(p - q).clamp_min(0.0)",
        "(p - q).abs()",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "bonus token drawn from the residual of the last draft token",
        "TokenLevel.recovery_probs",
        "missing[:, None] | _is_empty(residual)",
        "_is_empty(residual)",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "a residual that sums to 0 where p equals q is drawn from",
        "TokenLevel.recovery_probs",
        "missing[:, None] | _is_empty(residual)",
        "missing[:, None]",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "tokens after a rejected one are accepted",
        "first_path",
        "mask.long().cumprod(-1)",
        "mask.long()",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "the residual at the place before the rejected token",
        "_children",
        "place.clamp(max=len(tree) - 1)",
        "(place - 1).clamp(min=0)",
        (_TOKEN_PROOF,),
    ),
    # Over trees.
    Mutation(
        "a sibling is judged by p, not by what its earlier siblings left",
        "TokenLevel.accept_probs",
        "_normalised(torch.where(_1, left, residual))",
        "left",
        (_TREE_PROOF,),
    ),
    Mutation(
        "the recovered token forgets all rejected siblings but the last",
        "TokenLevel.recovery_probs",
        "_normalised(left) if rank else left",
        "p[rows, place]",
        (_TREE_PROOF,),
    ),
    Mutation(
        "a sibling is judged by what itself would leave, not its earlier sibling",
        "TokenLevel.accept_probs",
        "_less_q(left, tokens[:, rank.siblings], _of(probs, rank.siblings))",
        "_less_q(left, tokens[:, rank.nodes], _of(probs, rank.nodes))",
        (_TREE_PROOF,),
    ),
    Mutation(
        "a residual is judged by without being normalised",
        "TokenLevel.accept_probs",
        "_normalised(torch.where(_1, left, residual))",
        "torch.where(_1, left, residual)",
        (_TREE_PROOF,),
    ),
    Mutation(
        "the next sibling's q is taken from a residual that was not normalised",
        "TokenLevel.recovery_probs",
        "_normalised(left) if rank else left",
        "left",
        (_TREE_PROOF,),
    ),
    Mutation(
        "a node is accepted though its parent is not",
        "first_path",
        "_reached(taken, tables)",
        "taken",
        (_TREE_PROOF,),
    ),
    Mutation(
        "a later sibling is accepted beside an earlier one",
        "first_path",
        "mask & ~(mask[:, None] & tables.earlier_siblings).any(-1)",
        "mask",
        (_TREE_PROOF,),
    ),
    Mutation(
        "a child is judged by the place of its own number, not its parent's",
        "tree_tables",
        "[parent + 1 for parent in tree.parents]",
        "list(range(len(tree)))",
        (_TREE_PROOF,),
    ),
    # Acceptance of the block.
    Mutation(
        "block: weights of a prefix grow beyond 1",
        "_prefix_weights",
        "(weights[-1] * ratio[:, position]).clamp(max=1.0)",
        "weights[-1] * ratio[:, position]",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "block: the draft is accepted up to the first accepted node, not the last",
        "Block.accepted",
        "(mask * places).amax",
        "mask.long().cumprod(-1).sum",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "block: the residual forgets the weight of the prefix",
        "Block.recovery_probs",
        "_residual(weight, _1, _2)",
        "_residual(torch.ones_like(weight), _1, _2)",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "block: the residual takes q of the place before",
        "Block.recovery_probs",
        "place.clamp(max=drafted - 1)",
        "(place - 1).clamp(min=0)",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "block: chances without what a prefix has lost",
        "Block.accept_probs",
        "left / (left + (1 - weights[:, :-1]))",
        "weights[:, :-1]",
        (_BLOCK_PROOF,),
    ),
    Mutation(
        "a relaxed rule says it is lossless",
        "_Relaxed.lossless",
        "lossless = False",
        "lossless = True",
        ("test_relaxed.py",),
    ),
    # What a draft token was drawn from.
    Mutation(
        "stale q: the distribution of the draft step before",
        "PathDrafter.draft",
        "distributions.append(q)",
        "distributions.append(last if distributions else q)\nlast = q",
        (_JOINT, _OWN_Q),
    ),
    Mutation(
        "an argmax draft scored with a softmax q",
        "PathDrafter.draft",
        "batch.sampling.draw(decided, batch.generator)",
        "decided.argmax(-1)",
        (_OWN_Q,),
    ),
    Mutation(
        "draft tokens drawn at a temperature 10 % off the one they are scored with",
        "PathDrafter.draft",
        "batch.sampling.draw(decided, batch.generator)",
        "batch.sampling.draw(decided**1.1, batch.generator)",
        (_OWN_Q,),
    ),
    Mutation(
        "a draft that overflowed is scored with NaN",
        "PathDrafter.draft",
        "proper(batch.sampling.probabilities(scores))",
        "batch.sampling.probabilities(scores)",
        ("test_generate.py", "-k", "not_finite"),
    ),
    Mutation(
        "a sampled draft judged as if q were one-hot: exact, and wasteful",
        "_accept",
        "replace(draft, probs=None) if sampling.decided else draft",
        "replace(draft, probs=None)",
        ("test_along_path.py",),
    ),
    Mutation(
        "a coupled draft takes its noise from the place before",
        "PathDrafter.draft",
        "batch.cache.positions(1) + 1",
        "batch.cache.positions(1)",
        (_COUPLED,),
    ),
    # What p is and what is drawn from it.
    Mutation(
        "the bonus token drawn without temperature or filters",
        "_accept",
        "sampling.probabilities(scores)",
        "torch.cat([sampling.probabilities(scores)[:, :-1], logits[:, -1:].float().softmax(-1)], 1)",
        (_JOINT,),
    ),
    Mutation(
        "filters applied again to the residual",
        "_accept",
        "sampling.draw(_1, batch.generator)",
        "sampling.draw(sampling.probabilities(sampling.scores(_1.log()[:, None], Prefixes(batch.sequences)))[:, "
        "0], batch.generator)",
        (_JOINT,),
    ),
    Mutation(
        "off by one row of logits: the token after the draft from the place before",
        "TokenLevel.recovery_probs",
        "(rows, place)",
        "(rows, (place - 1).clamp(min=0))",
        (_TOKEN_PROOF,),
    ),
    Mutation(
        "off by one row of logits: every draft token judged by the row after its own",
        "verify",
        "batch.runner.logits(target.resumed_at(_1), _2, _3).logits",
        "batch.runner.logits(target.resumed_at(_1), _2, _3).logits.roll(-1, 1)",
        (_GREEDY,),
    ),
    Mutation(
        "acceptance and residual share their noise",
        "_accept",
        "torch.rand((_1, _2), generator=batch.generator, dtype=_3, device=_4)",
        # In float64 the generator gives uniform numbers and exponential ones of the same bits.
        "torch.rand((_1, p.shape[-1]), generator=batch.generator.clone_state(), dtype=torch.float64)[:, :_2].to(_3)",
        (_JOINT, _MANY),
    ),
    Mutation(
        "every round draws the same acceptance",
        "_accept",
        "torch.rand(_1, generator=batch.generator, dtype=_2, device=_3)",
        "torch.rand(_1, generator=torch.Generator().manual_seed(0), dtype=_2, device=_3)",
        (_JOINT, _MANY),
    ),
    Mutation(
        "all rows draw with the same noise",
        "drawn_by_inversion",
        "total.shape",
        "()",
        (_ROWS,),
    ),
    Mutation(
        "all rows of a coupled generation draw with the same noise",
        "Coupling.choose",
        "key + _GOLDEN * (rows + 1)[:, None]",
        "key.expand(batch, 1)",
        (_ROWS,),
    ),
    Mutation(
        "the race for a draw is run with uniform noise, not exponential",
        "drawn_by_race",
        "torch.empty_like(weights).exponential_",
        "torch.empty_like(weights).uniform_",
        ("test_sampling.py",),
    ),
    Mutation(
        "a draw may fall on what has no weight",
        "drawn_by_inversion",
        "torch.searchsorted(sums, places, right=True)",
        "torch.searchsorted(sums, places)",
        ("test_sampling.py",),
    ),
    Mutation(
        "probabilities in the precision of the logits, not in float32",
        "Warping.scores",
        "logits.float",
        "logits.clone",
        ("test_sampling.py",),
    ),
    Mutation(
        "the seed is not used",
        "Generation.__init__",
        "generator.manual_seed(seed)",
        "generator.seed()",
        (_SEEDS,),
    ),
    Mutation(
        "logits that are NaN are drawn from",
        "_accept",
        "finite &= logits.amax(-1).isfinite()",
        "finite = torch.ones_like(finite)",
        ("test_generate.py", "-k", "not_finite"),
    ),
    # Where text ends.
    Mutation(
        "an end-of-sequence token inside an accepted run is not seen",
        "Stopping.shortened",
        "first_end(run, self.eos)",
        "len(run)",
        (_EOS,),
    ),
    Mutation(
        "the end-of-sequence token itself is dropped",
        "Stopping.shortened",
        "first_end(run, self.eos) + 1",
        "first_end(run, self.eos)",
        (_EOS,),
    ),
    Mutation(
        "an accepted run overshoots max_new_tokens",
        "Stopping.shortened",
        "min(first_end(run, self.eos) + 1, self.max_new_tokens - len(tokens))",
        "first_end(run, self.eos) + 1",
        (_EXACT_LENGTH, "test_generate.py", "test_request.py"),
    ),
    Mutation(
        "generation stops a token short of max_new_tokens",
        "Stopping.ends",
        "self.max_new_tokens",
        "self.max_new_tokens - 1",
        (_EXACT_LENGTH,),
    ),
    Mutation(
        "text that holds the pad id is taken for padding",
        "prepared_request",
        "mask.sum(1)",
        "(input_ids != (0 if pad is None else int(pad.flatten()[0]))).sum(1)",
        ("test_generate.py", "-k", "pad_id"),
    ),
    Mutation(
        "a stopping criterion inside an accepted run is not heard",
        "Stopping._by_criteria",
        "verdicts[row]",
        "verdicts[row] and length == starts[row] + len(runs[row])",
        (_CRITERIA,),
    ),
    Mutation(
        "stopping criteria see the accepted run whole, not token by token",
        "Stopping._by_criteria",
        "ids[:, :length].contiguous()",
        "ids",
        (_CRITERIA,),
    ),
    Mutation(
        "text after a stop string is streamed and returned",
        "judge_together",
        "cut[row][:end]",
        "cut[row]",
        (_CRITERIA,),
    ),
    # What logits processors see.
    Mutation(
        "logits processors are given the last token alone",
        "PrefixProcessing.scores",
        "ids[:, :length]",
        "ids[:, length - 1:length]",
        (_PROCESSORS,),
    ),
    Mutation(
        "penalties count draft tokens that come later, rejected ones among them",
        "PrefixProcessing.scores",
        "ids[:, :length]",
        "ids",
        (_PROCESSORS,),
    ),
    Mutation(
        "every place is processed with the prefix of the first",
        "PrefixProcessing.scores",
        "ids[:, :length]",
        "ids[:, :min(first)]",
        (_PROCESSORS, _PLACES),
    ),
    Mutation(
        "a draft step's processors do not see the draft so far",
        "PathDrafter.draft",
        "Prefixes(batch.sequences, tokens)",
        "Prefixes(batch.sequences)",
        (_AS_GOOD,),
    ),
    Mutation(
        "drafts are not processed at all",
        "PathDrafter.draft",
        "batch.sampling.scores(step.logits, Prefixes(batch.sequences, tokens))",
        "step.logits.float()",
        (_AS_GOOD,),
    ),
    Mutation(
        "a draft goes on after the end of the text, and processors see it",
        "PrefixProcessing.scores",
        "first_end(run, self.eos)",
        "len(run)",
        ("test_processors.py", "-k", "beyond"),
    ),
    Mutation(
        "a processor that reads the prefix is taken for a warper",
        "_stateless",
        "type(processor) in _WARPERS",
        "isinstance(processor, tuple(_WARPERS))",
        ("test_request.py", "-k", "users_warper"),
    ),
    # Scores that are returned.
    Mutation(
        "scores of the place before a token are returned as its own",
        "Record.keep",
        "(index, place)",
        "(index, place - 1)",
        ("test_score_record.py",),
    ),
    Mutation(
        "scores of tokens after the end of a row are returned",
        "Record.padded",
        "length <= index",
        "length < index",
        ("test_score_record.py",),
    ),
    Mutation(
        "scores are returned as logits",
        "Batch.record",
        "self.logits.keep(logits, self.running, starts, counts)",
        "self.logits.keep(scores, self.running, starts, counts)",
        ("test_score_record.py",),
    ),
    # Keys and values of an earlier turn.
    Mutation(
        "a padded row takes up the keys and values of its padding",
        "load_past",
        "[row.nonzero().flatten() for row in _1]",
        "[torch.arange(past_length(past)) for row in _1]",
        (_PADDED_PAST,),
    ),
    Mutation(
        "the last run of a row is missing from the cache that is returned",
        "commit",
        "len(rows[row].tokens)",
        "len(rows[row].tokens) * (row in batch.unfinished)",
        ("test_transfer.py",),
    ),
    # Rows that have ended.
    Mutation(
        "rows that are left choose with the noise of those that ended",
        "Sampling.narrowed",
        "self._coupling and self._coupling.narrowed(rows)",
        "self._coupling",
        (_NOISE,),
    ),
    Mutation(
        "the cache keeps its first rows in place of those that are left",
        "Batch.drop_finished",
        "self.cache.narrow(kept)",
        "self.cache.narrow(range(len(kept)))",
        (_ENDED,),
    ),
    Mutation(
        "ended rows are run to the last",
        "Batch.drop_finished",
        "2 * len(kept) > len(running)",
        "True",
        (_ENDED,),
    ),
    # The cache.
    Mutation(
        "the draft's tokens are not all rolled back",
        "PathDrafter.draft",
        "batch.cache.rollback(len(tokens))",
        "batch.cache.rollback(len(tokens) - 1)",
        (_GREEDY,),
    ),
    Mutation(
        "the cursor is one too far after a rejection",
        "commit",
        "len(rows[row].tokens)",
        "len(rows[row].tokens) + (rows[row].accepted < draft.length)",
        (_GREEDY,),
    ),
    Mutation(
        "the cursor is one behind after a rejection",
        "commit",
        "len(rows[row].tokens)",
        "max(len(rows[row].tokens) - (rows[row].accepted < draft.length), 0)",
        (_GREEDY,),
    ),
    Mutation(
        "positions are one off",
        "SharedCache.positions",
        "self._cursors.slots(width)",
        "self._cursors.slots(width) + 1",
        (_GREEDY, "test_adapters.py"),
    ),
    Mutation(
        "ragged rows are written where the longest one stands",
        "Cursors.slots",
        "cursor[:, None]",
        "cursor[:, None].amax(0, keepdim=True).expand(len(self.lengths), 1)",
        (_RAGGED,),
    ),
    Mutation(
        "the mask of ragged rows admits the token after a query",
        "attention_mask.mask",
        "slots[row, query]",
        "slots[row, query] + 1",
        (_RAGGED,),
    ),
    Mutation(
        "the mask of ragged rows admits rejected tokens of other rounds",
        "attention_mask.mask",
        "slots[row, query]",
        "slots[:, query].amax()",
        (_RAGGED,),
    ),
    Mutation(
        "a program is trusted whatever bits it gives",
        "BoundPrograms._try",
        "not self._runtime.agree(given.flat(), expected.flat())",
        "False",
        ("test_what_gives_other_bits_or_fails_is_never_used",),
    ),
    Mutation(
        "keys and values stay as a wrong program left them",
        "BoundPrograms._try",
        "candidate.refuse('it gave something else than the stock modules')\nreturn stock()",
        "candidate.refuse('it gave something else than the stock modules')\nreturn expected",
        ("test_what_writes_other_keys_and_values_does_no_harm",),
    ),
    Mutation(
        "programs outlive the weights they were made of",
        "GraphCache.bound_to",
        "not current.state.holds()",
        "False",
        ("test_graph_cache.py::test_other_weights_are_noticed",),
    ),
    Mutation(
        "programs know no window",
        "ModelRunner._kind",
        "self._window is not None",
        "self._window == 0",
        ("test_graph_cache.py::test_greedy_text_is_the_stock_models",),
    ),
    Mutation(
        "layers share a function though one of them uses its number",
        "_traced",
        "str(first) == str(last)",
        "True",
        ("test_layer_calls.py::test_a_layer_that_uses_its_number_is_no_others",),
    ),
    Mutation(
        "layers that attend otherwise share a function",
        "LayerCall.likeness",
        "self._structure()",
        "()",
        ("test_layers_that_attend_otherwise_are_not",),
    ),
    Mutation(
        "a graph reads the tokens it was captured with",
        "_Graph.run",
        "static.copy_(tensor)",
        "pass",
        ("test_cuda_graphs.py::test_greedy_text_is_the_stock_models",),
    ),
    Mutation(
        "a graph's outputs are handed out as they lie",
        "_Graph.run",
        "(output.clone() for output in self.recording.outputs)",
        "self.recording.outputs",
        ("test_cuda_graphs.py::test_greedy_text_is_the_stock_models",),
    ),
    Mutation(
        "a graph is used for a cache that lies elsewhere",
        "_Graphs.__call__",
        "tensor.data_ptr()",
        "0",
        ("test_another_generation_has_a_cache_elsewhere",),
    ),
    Mutation(
        "a graph is trusted whatever bits it gives",
        "_Graphs._recorded",
        "not equal(graph.run(inputs), expected)",
        "False",
        ("test_what_cannot_be_captured_is_run_by_the_stock_modules",),
    ),
    Mutation(
        "a graph keeps the cache it was captured on",
        "_Graphs.__call__",
        "self._graphs[key] = graph",
        "self._graphs[key] = graph\nself._memory = memory",
        ("test_cuda_graphs.py::test_a_cache_is_free_when_its_generation_ends",),
    ),
    Mutation(
        "the last token sees what stands behind it in its bucket",
        "attention_mask",
        "not padded",
        "True",
        ("test_cuda_graphs.py::test_greedy_text_is_the_stock_models",),
    ),
    Mutation(
        "attention with shared key heads forgets its mask",
        "_attend",
        "functional.scaled_dot_product_attention(_1, _2, _3, attn_mask=_4, scale=_5, enable_gqa=True)",
        "functional.scaled_dot_product_attention(_1, _2, _3, scale=_5, enable_gqa=True)",
        ("test_grouped_queries.py",),
    ),
    Mutation(
        "growing the cache loses what it held",
        "_SharedLayer._grown",
        "new[:, :, :old.shape[2]] = old",
        "new[:, :, :old.shape[2]] = 0",
        (_CACHE,),
    ),
    Mutation(
        "prefill reads a padded row from its padding on",
        "prefill",
        "request.read[row, columns[row].nonzero().flatten()[-1 - count:-1]]",
        "request.read[row, :count]",
        (_RAGGED,),
    ),
    Mutation(
        "NaN that a draft token left in the cache stays there",
        "rounds",
        "batch.cache.scrub(_1)",
        "pass",
        ("test_generate.py", "-k", "spoils"),
    ),
    # Recurrent layers.
    Mutation(
        "a pass writes into the recurrent state that it would go back to",
        "RecurrentLayer.enter",
        "snapshot.mapped(torch.clone)",
        "snapshot",
        ("test_recurrent.py", "test_hybrids.py"),
    ),
    Mutation(
        "all rows settle at the recurrent state of the first",
        "RecurrentLayer.settle",
        "[_1 for count in tokens]",
        "[_1 for count in [tokens[0]] * len(tokens)]",
        ("test_recurrent.py",),
    ),
    Mutation(
        "recurrent layers read what stands behind a shorter prompt",
        "ModelRunner.prefill",
        "any(count < tokens.shape[1] for count in counts)",
        "False",
        ("test_hybrids.py",),
    ),
    # Paths and gates.
    Mutation(
        "an early exit runs one sublayer more",
        "LayerPath.up_to",
        "sublayer >= end",
        "sublayer > end",
        ("test_layer_path.py",),
    ),
    Mutation(
        "verification resumes at the last skipped sublayer, not the first",
        "LayerPath.resume_point",
        "min(self.skipped, default=None)",
        "max(self.skipped, default=None)",
        (_GREEDY, "test_layer_path.py"),
    ),
    Mutation(
        "the states of the last draft token come first",
        "verify",
        "[draft.resume.states, tail]",
        "[tail, draft.resume.states]",
        (_GREEDY,),
    ),
    Mutation(
        "what was exact is computed again",
        "verify",
        "draft.resume is None",
        "True",
        ("test_along_path.py",),
    ),
    Mutation(
        "a skipped sublayer gives its input in place of nothing",
        "_without",
        "torch.zeros_like(hidden) if gives == 'zeros' else hidden",
        "hidden",
        ("test_gated_view.py",),
    ),
    Mutation(
        "gates are put on the model's own modules",
        "copied",
        "object.__new__(type(module))",
        "module",
        ("test_api.py",),
    ),
    # How long drafts are, and look-ups.
    Mutation(
        "cursors stay ahead where a draft ends early",
        "PathDrafter.draft",
        "batch.cache.rollback(len(tokens))",
        "batch.cache.rollback(len(tokens) - (len(tokens) < length))",
        (_CONTROLLED,),
    ),
    Mutation(
        "useless drafts are never given up",
        "LossBudget.count",
        "max(self._lost + cost - gained, -MAY_LOSE)",
        "min(self._lost + cost - gained, -MAY_LOSE)",
        ("test_control.py",),
    ),
    # Rows that are kept in step.
    Mutation(
        "a row that was cut goes on from the token that was cut off last",
        "judge_together",
        "accepted.count.clamp(max=most)",
        "accepted.count",
        (_IN_STEP,),
    ),
    Mutation(
        "a row that was cut goes on from the target's token after what was cut off",
        "judge_together",
        "accepted.finite & (accepted.count < most)",
        "accepted.finite",
        (_IN_STEP,),
    ),
    Mutation(
        "a row that ends is not cut: ends come too often",
        "judge_together",
        "run[:most]",
        "run if set(run) & stopping.eos else run[:most]",
        ("test_lockstep.py::test_samples_follow_the_exact_joint",),
    ),
    Mutation(
        "a row in doubt that has no token stalls the others",
        "lockstep_limit",
        "(len(run) for run in runs if run)",
        "(len(run) for run in runs)",
        ("test_a_row_that_is_not_finite_does_not_stall_the_others",),
    ),
    Mutation(
        "rows are in step for ever",
        "CostAwareController.learn",
        "self._in_step = False",
        "self._in_step = True",
        ("test_control.py", _IN_STEP),
    ),
    Mutation(
        "what was dropped to stay in step counts as gained",
        "LossBudget.count",
        "committed + dropped if self.is_new else committed",
        "committed + dropped",
        ("test_control.py",),
    ),
    Mutation(
        "a confidence that was not seen keeps what a fair draft shows",
        "AcceptanceModel.chance",
        "-_log_odds(self._fair[bin_]) - self._shift",
        "-_log_odds(self._fair[bin_])",
        ("test_what_stands_and_what_falls_shifts_all_confidences",),
    ),
    Mutation(
        "a row that falls behind for good is hidden by the mean",
        "BatchProgress._place",
        "mean - min(gained)",
        "0",
        ("test_a_batch_whose_hindmost_row_gains_nothing_gains_nothing",),
    ),
    Mutation(
        "the end of a row counts as a loss",
        "BatchProgress.after",
        "before = self._place(going)",
        "before = self._place(range(len(tokens)))",
        ("test_the_end_of_a_row_is_no_gain_and_no_loss",),
    ),
    Mutation(
        "a draft that could hardly pay is tried at once",
        "LossBudget.opens",
        "at_risk > 0",
        "at_risk < 0",
        ("test_a_draft_that_could_hardly_pay_is_not_tried_before_its_price_is_saved_up",),
    ),
    Mutation(
        "a batch looks up as much as a row",
        "Prospects.look_up_length",
        "self._costs.rows",
        "share",
        ("test_one_row_looks_up_all_it_may_and_a_batch_as_much_as_pays",),
    ),
    Mutation(
        "ended rows have a say in how long drafts are",
        "ConfidentController.goes_on",
        "live and confidence >= self._threshold",
        "confidence >= self._threshold",
        ("test_control.py",),
    ),
    Mutation(
        "the end of a text is a place before itself",
        "SuffixIndex.extend",
        "self._tokens.append(token)",
        "self._tokens.append(token)\nself._ends[tuple(self._tokens[-self._sizes[-1]:])] = len(self._tokens)",
        ("test_suffix_index.py",),
    ),
    Mutation(
        "a look-up takes in what was generated only once",
        "Batch.index",
        "self.sequences.tokens_from(row, len(index))",
        "self.sequences.tokens_from(row, 0) if len(index) == 0 else ()",
        ("test_prompt_lookup.py",),
    ),
    # Linears of few rows.
    Mutation(
        "blocks of few rows lose the bias",
        "_few_rows",
        "product += linear.bias",
        "product += 0",
        ("test_few_rows.py",),
    ),
    Mutation(
        "with AVX-512 wide layers go on with the weight on the left",
        "_pays_with_avx512",
        "8 <= rows <= 48",
        "8 <= rows <= 64",
        ("test_the_weight_is_on_the_left_where_that_was_the_faster_way",),
    ),
    Mutation(
        "a program compared over one number of slots runs over all",
        "_Candidate.serves",
        "self.lengths.count(length)",
        "len(self.lengths)",
        ("test_passes_that_always_see_as_many_slots_are_compared_a_few_times_and_for_no_other_number",),
    ),
    Mutation(
        "a batch looks up as soon as one row has a match",
        "Prospects.look_up_length",
        "best if share == 1 or self._speed(0, best, share) > 1 else 0",
        "best",
        ("test_rows_with_a_match_must_be_enough_to_pay_for_those_without",),
    ),
    # Costs in batches.
    Mutation(
        "a draft costs in every batch what it costs one row",
        "CostAwareController.choose",
        "self._by_rows.in_batch(len(live))",
        "self._by_rows.in_batch(1)",
        ("test_what_a_draft_costs_in_a_batch_is_what_was_measured_there",),
    ),
    Mutation(
        "between two sizes of batches costs lie on a line over rows",
        "BatchCosts.in_batch",
        "math.log(rows / below.rows) / math.log(above.rows / below.rows)",
        "(rows - below.rows) / (above.rows - below.rows)",
        ("test_between_sizes_of_batches_costs_lie_on_a_line_over_logarithms",),
    ),
    Mutation(
        "rows out of step are timed the wrong way round",
        "_Bench.out_of_step",
        "seconds[id(behind)] / seconds[id(alike)]",
        "seconds[id(alike)] / seconds[id(behind)]",
        ("test_rows_at_different_places_are_timed_beside_rows_that_stand_alike",),
    ),
    Mutation(
        "in other batches every draft costs what a look-up does",
        "Candidate.costs_in",
        "PLAIN if self.path is None else draft_name(self.path)",
        "PLAIN",
        ("test_what_was_chosen_is_measured_in_batches_of_other_sizes",),
    ),
    Mutation(
        "batches in which a draft lost are drafted in",
        "Choice.in_batch",
        "self if self.most_rows is None or rows <= self.most_rows else Choice(None)",
        "self",
        ("test_batches_in_which_drafts_lose_are_decoded_plainly",),
    ),
    # Compiled passes.
    Mutation(
        "a compiled pass is trusted whatever it gives",
        "_is_close",
        "bool(error <= eps ** 0.5 * size)",
        "True",
        ("test_what_gives_something_else_is_never_used",),
    ),
    Mutation(
        "a compiled pass runs over sizes that it was not compiled for",
        "_Compiled._holds_for",
        "if min(sizes) < _SMALLEST:\n    return False",
        "return True",
        ("test_sizes_that_a_pass_was_not_compiled_for_are_told",),
    ),
    Mutation(
        "a pass is compiled for the number of slots it was first seen with",
        "_with_symbol",
        "DimDynamic.DYNAMIC",
        "DimDynamic.STATIC",
        ("test_one_graph_serves_any_number_of_slots_and_alike_layers",),
    ),
    Mutation(
        "compiled layers share a graph though one of them uses its number",
        "_shared",
        "first.code == last.code",
        "True",
        ("test_compiled.py::test_a_layer_that_uses_its_number_is_no_others",),
    ),
    # Packed weights.
    Mutation(
        "packed layers lose the bias",
        "_product",
        "torch.ops.mkldnn._linear_pointwise(states, weight, bias, 'none', [], '')",
        "torch.ops.mkldnn._linear_pointwise(states, weight, None, 'none', [], '')",
        ("test_packed.py",),
    ),
    Mutation(
        "programs keep the packed weights of another pass",
        "HeldWeights.replaced",
        "self._put(tensors)",
        "pass",
        ("test_packed.py",),
    ),
    Mutation(
        "unpacked weights ask for no gradient",
        "PackedLinear.give_back",
        "self._put(self.weight.to_dense(), needed)",
        "self._put(self.weight.to_dense())",
        ("test_packed.py",),
    ),
    # Processors and criteria with memory.
    Mutation(
        "processors with memory are asked for whole blocks",
        "is_stateless",
        "type(processor) in _STATELESS or getattr(processor, 'stateless', False) is True",
        "True",
        ("test_judge_in_order.py",),
    ),
    Mutation(
        "what a draft told a processor is not rolled back",
        "RollbackProcessing.roll_back",
        "calls and _can_roll_back(processor)",
        "False",
        ("test_judge_in_order.py",),
    ),
    Mutation(
        "a criterion with memory is shown rows filled up with padding",
        "Generation.__init__",
        "request.sampling.in_order or request.stopping.stateful",
        "request.sampling.in_order",
        ("test_judge_in_order.py", "-k", "criteria"),
    ),
    Mutation(
        "a place is judged in order though a draft token spoiled it",
        "judge_in_order",
        "draft.length and broken",
        "False",
        ("test_judge_in_order.py", "-k", "spoils"),
    ),
    Mutation(
        "a row that rejects does not end the round for the others",
        "judge_in_order",
        "all(row.ended or row.accepted > place for row in rows.values())",
        "any(row.ended or row.accepted > place for row in rows.values())",
        ("test_judge_in_order.py", "-k", "criteria or memory"),
    ),
    Mutation(
        "recovered tokens of a draft judged in order are drawn from p",
        "_judge_place",
        "rule.recovery_probs(effective, p_rule, torch.zeros_like(accepted))",
        "decided[:, 0]",
        ("test_judge_in_order.py", "-k", "joint"),
    ),
    # Files and pages.
    Mutation(
        "a recipe is written between quotes and not by repr",
        "Recipe.save",
        "repr(json.dumps(asdict(self)))",
        'f\'"""{json.dumps(asdict(self))}"""\'',
        ("test_a_draft_of_any_name_is_saved_as_code_that_runs",),
    ),
    Mutation(
        "names in tables of a report are markup",
        "table",
        "map(escaped, row)",
        "row",
        ("test_names_change_nothing_of_the_page",),
    ),
    Mutation(
        "logits of a draft are the full model's",
        "draft_logits",
        "draft.path",
        "LayerPath.full",
        ("test_pruned.py",),
    ),
    Mutation(
        "the page on adapters compares the pruned model with itself",
        "your_own_adapter.md",
        "draft_logits(model, draft, ids, block=6, adapter=adapter)",
        "pruned_logits(model, pruned, ids, block=6)",
        ("test_your_own_adapter.py",),
    ),
    # Wrappers, and the models inside those of other libraries.
    Mutation(
        "a deep copy of a wrapper is a wrapper of another model",
        "SelfSpeculative.__deepcopy__",
        "return self",
        "other = copy(self)\nother.model = copy(self.model)\nreturn other",
        ("test_options_that_are_copied_deeply_name_the_same_wrapper",),
    ),
    Mutation(
        "activations that are rounded over a whole pass are drafted for",
        "_rounds_over_the_pass",
        "getattr(getattr(module, '_packed_params', None), 'dtype', None) is not torch.float16",
        "getattr(getattr(module, '_packed_params', None), 'dtype', None) is torch.float16",
        ("test_dynamic_quantisation_to_8_bits_is_refused",),
    ),
    Mutation(
        "a PEFT model is wrapped without its adapter",
        "_inside_peft",
        "tuner.get_submodule('model')",
        "tuner.unload()",
        ("test_a_wrapped_adapter_gives_its_own_text",),
    ),
    Mutation(
        "a soft prompt is left out without a word",
        "_inside_peft",
        "raise UnsupportedModelError(_1)",
        "return tuner",
        ("test_a_soft_prompt_is_no_part_of_the_model",),
    ),
    # Prompts that are no tokens, and caches of states.
    Mutation(
        "a soft prompt is dropped",
        "first_inputs",
        "prepare is None",
        "True",
        ("test_first_inputs.py::test_a_soft_prompt_is_read",),
    ),
    Mutation(
        "embeddings are ignored where ids stand beside them",
        "prepared_request",
        "embeddings is not None",
        "embeddings is not None and not input_ids.numel()",
        ("test_ids_beside_embeddings_are_the_text_that_is_added_to",),
    ),
    Mutation(
        "the last embedding of a prompt is read as a token",
        "Generation.__init__",
        "request.read[:, -1:].to(device) if request.embeddings else None",
        "None",
        ("test_embeddings_alone_give_new_tokens_alone",),
    ),
    Mutation(
        "padding between a prefix and the text counts towards windows",
        "check_model_inputs",
        "smallest_window(config) is not None",
        "False",
        ("test_padding_that_would_count_as_text_is_refused",),
    ),
    Mutation(
        "any positions are taken for those of the mask",
        "_follow_from",
        "bool(_1)",
        "True",
        ("test_other_positions_are_refused",),
    ),
    Mutation(
        "a cache that comes back has columns that a shorter row has not filled",
        "store_past",
        "min(int(row[-1]) + 1 if len(row) else 0 for row in places)",
        "max(int(row[-1]) + 1 if len(row) else 0 for row in places)",
        ("test_rows_that_ended_apart_go_on_from_what_all_have_filled",),
    ),
    Mutation(
        "states of a past are not taken up",
        "load_past",
        "any(_has_states(layer))",
        "False",
        ("test_a_chat_goes_on",),
    ),
    Mutation(
        "a prompt is read from empty states though a past was taken up",
        "ModelRunner.prefill",
        "not self._cache.empty",
        "any(self._cache.lengths)",
        ("test_a_chat_goes_on",),
    ),
    # Bad input.
    Mutation(
        "slack is as long as the control allows, however few tokens are wanted",
        "Generation.__init__",
        "min(control.longest, request.stopping.max_new_tokens)",
        "control.longest",
        ("test_slack_is_no_longer_than_what_is_left_to_generate",),
    ),
    Mutation(
        "masks of any number mean what 1 means",
        "check_mask",
        "not bool(((attention_mask == 0) | (attention_mask == 1)).all())",
        "False",
        ("test_bad_input.py", "-k", "mask"),
    ),
    Mutation(
        "values of sampling options are not looked at",
        "check_values",
        "value_of('do_sample')",
        "False",
        ("test_bad_input.py", "-k", "top_p or eta_cutoff"),
    ),
    Mutation(
        "token ids beyond the vocabulary are taken",
        "_is_token",
        "0 <= int(value) < scope.vocabulary",
        "0 <= int(value)",
        ("test_bad_input.py", "-k", "suppress_tokens or bad_words"),
    ),
    Mutation(
        "what a custom_generate is handed is not looked at",
        "prepared_request",
        "check_values(_1, _2)",
        "pass",
        ("test_bad_input.py", "-k", "lets_through"),
    ),
    # Programs that outlive what they were recorded of.
    Mutation(
        "programs outlive a change of a module's attributes",
        "ModelState.__init__",
        "self._follow(vars(module), self._constants)",
        "pass",
        ("test_programs_are_of_the_model_as_it_is[scaling-traced]",),
    ),
    Mutation(
        "programs outlive a patch of a class",
        "ModelState.__init__",
        "self._contents.append(vars(kind).values())",
        "pass",
        ("test_programs_are_of_the_model_as_it_is[class: mlp-traced]",),
    ),
    Mutation(
        "programs outlive hooks of all modules",
        "ModelState.__init__",
        "(*GLOBAL_HOOKS, *code.mappings)",
        "code.mappings",
        ("test_programs_are_of_the_model_as_it_is[hook of all-traced]",),
    ),
    Mutation(
        "programs outlive other strides of a weight",
        "_layout",
        "tensor.stride()",
        "()",
        ("test_programs_are_of_the_model_as_it_is[strides of a weight-traced]",),
    ),
    Mutation(
        "programs outlive a function that a kernel library replaced",
        "ModelState.__init__",
        "code.names.values()",
        "()",
        ("test_programs_are_of_the_model_as_it_is[function: rotary-traced]",),
    ),
    Mutation(
        "what is computed of buffers is recorded as it was",
        "_graph",
        "torch._C._jit_pass_constant_propagation_immutable_types",
        "torch._C._jit_pass_constant_propagation",
        ("test_programs_are_of_the_model_as_it_is[buffers in place-traced]",),
    ),
    Mutation(
        "a model changed within a generation is recorded as the one before",
        "BoundPrograms._try",
        "not self.state.holds()",
        "False",
        ("test_what_is_changed_within_a_generation_is_recorded_by_none",),
    ),
    Mutation(
        "programs run where a function mode should see every operation",
        "is_watched",
        "any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())",
        "False",
        ("test_a_function_mode_sees_every_pass",),
    ),
    Mutation(
        "views compute linear layers though their class was patched",
        "_is_plain",
        "type(module) is not nn.Linear or not _runs_torchs_product()",
        "type(module) is not nn.Linear",
        ("test_views_are_of_the_model_as_it_is[class: linear]",),
    ),
    Mutation(
        "views attend by the stock kernel though another took its name",
        "_shares_heads",
        "_runs_stock_kernel(module)",
        "True",
        ("test_views_are_of_the_model_as_it_is[kernel registered]",),
    ),
    # What processors and criteria with memory are shown.
    Mutation(
        "a processor with memory is called once more after all rows have ended",
        "judge_in_order",
        "all(row.ended for row in rows.values())",
        "not rows",
        ("test_remembering.py", "-k", "calls_and_text and both"),
    ),
    Mutation(
        "scores of places judged in order are kept at the first place of the round",
        "_stop",
        "len(row.tokens) - (number in grown)",
        "0",
        ("test_remembering.py", "-k", "scores_asked"),
    ),
    # What a prompt shows of a draft.
    Mutation(
        "the target is held against itself on the prompt",
        "prefill_with_evidence",
        "drafted.logits",
        "logits",
        ("test_evidence_is_the_exit_beside_the_target",),
    ),
    Mutation(
        "a draft that is worth nothing on the prompt is tried all the same",
        "CostAwareController._at_risk",
        "self._prospects.pays(self._on_prompt)",
        "self._on_prompt >= 0",
        ("test_a_draft_that_is_worth_nothing_on_the_prompt_is_not_tried_in_a_short_text",),
    ),
)
