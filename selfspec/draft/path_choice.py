"""Drafting along the best of a family of paths, all of which are tried every few rounds."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from selfspec.architecture import Adapter
from selfspec.draft.along_layer_path import LayerPathDrafter, LayerPathProposer
from selfspec.draft.declaration import drafter, read_number
from selfspec.draft.draft import Budget, Draft
from selfspec.draft.drafter import Drafter, DraftMemory, Exit
from selfspec.draft.early_exit import EarlyExit
from selfspec.draft.layer_skip import LayerSkip
from selfspec.draft.path_trial import ExitTrial, PathTrial, Trial, Tried
from selfspec.draft.rows_view import RowsView
from selfspec.draft.verdict import Verdict
from selfspec.errors import DraftConfigError
from selfspec.model.layer_path import LayerPath, Part
from selfspec.model.registry import find_adapter
from selfspec.runtime.runner import PassResult
from selfspec.values import shown

# The most paths of a family, and the most paths whose recorded passes a wrapper keeps.
FAMILY = 6
# Tokens of a trial, all rows together.
TOKENS = 4
# The most rounds between two trials.
_LONGEST = 32
# The speed-up over the path that drafts which another path must promise to replace it.
_CLEAR = 1.01
# The weight of a trial relative to the next one, and the tokens that the prior counts for, the mean of all paths.
_MEMORY, _PRIOR = 0.8, 2.0


class ChosenPath(Drafter):
    """Drafts along one path of a family, all of which leave out whole layers, and chooses the path during generation.

    Every few rounds, verification tries all paths on the first tokens that it reads; see `PathTrial`. The choice weighs
    how often a path's tokens would be accepted, at accepted tokens, against the path's cost. Trials become rare while
    family and choice stay the same. Both depend on earlier rounds alone, so the output is exact under every rule. Where
    drafts of a row may not depend on other rows (see `FixedLength`), the first path drafts.
    """

    runs = "layers"

    @abstractmethod
    def family(self, depth: int) -> Sequence[LayerPathDrafter]:
        """Return the paths for a network of `depth` layers; the first one drafts before any trial.

        Raises:
            DraftConfigError: the network has no such paths.
        """

    @abstractmethod
    def trial(self, family: Sequence[LayerPathDrafter], depth: int, rows: RowsView) -> Trial:
        """Return the trial of a family's paths, in their order."""

    @property
    def looked_for(self) -> int:
        """Size of the skip sets that trials add to the family; 0: the family never changes."""
        return 0

    def check(self, depth: int) -> None:
        for each in self.family(depth):
            each.check(depth)

    def check_model(self, model: PreTrainedModel, adapter: Adapter) -> None:
        adapter.check_trees(model)

    def cost(self, model: PreTrainedModel, adapter: Adapter) -> float:
        return self.family(len(adapter.decoder_layers(model)))[0].cost(model, adapter)

    def begin(self, rows: RowsView) -> ChosenPathProposer:
        return ChosenPathProposer(self, rows)


def tokens_of(rows: RowsView) -> int:
    """Return the number of tokens of each row that a trial reads."""
    return max(TOKENS // len(rows.running), 1)


@dataclass
class Worth:
    """Holds what trials found of a path: tokens tried, how many of them would be accepted, and the cost of a step."""

    cost: float
    accepted: float = 0.0
    tokens: float = 0.0

    def count(self, chance: float, tokens: int) -> None:
        """Count a trial with its acceptance rate and its number of tokens."""
        self.accepted = _MEMORY * self.accepted + chance * tokens
        self.tokens = _MEMORY * self.tokens + tokens


class RecentPaths(DraftMemory):
    """Remembers the paths that a wrapper drafted along recently."""

    def __init__(self) -> None:
        self._paths: OrderedDict[LayerPath, None] = OrderedDict()

    def use(self, path: LayerPath, rows: RowsView) -> None:
        """Note that a path drafts; beyond `FAMILY` paths, drop the recorded passes of the least recently used one."""
        self._paths[path] = None
        self._paths.move_to_end(path)
        if len(self._paths) > FAMILY:
            rows.runner.forget(self._paths.popitem(last=False)[0])


class ChosenPathProposer(LayerPathProposer):
    """Drafts along the chosen path for one generation.

    Attributes:
        family: the paths, each with its trial results.
        chosen: the path that drafts.
        votes: how often the skip sets of recent trials left out each layer.
    """

    def __init__(self, drafter: ChosenPath, rows: RowsView) -> None:
        family = drafter.family(rows.runner.depth)
        super().__init__(family[0], rows.runner.depth)
        self._drafter, self._looked_for, self._memory = drafter, drafter.looked_for, (type(drafter), "paths")
        self._model, self._depth = rows.runner.model, rows.runner.depth
        self._adapter = find_adapter(self._model)
        self.family = {each: self._unknown(each) for each in family}
        self.chosen, self._first_cost = family[0], self.family[family[0]].cost
        self.votes = [0.0] * self._depth
        self._rounds, self._due, self._gap, self._added = 0, 0, 1, False
        self._exchanges = 0

    def _unknown(self, path: LayerPathDrafter) -> Worth:
        return Worth(path.cost(self._model, self._adapter))

    @property
    def early_exit(self) -> Exit | None:
        return None

    def propose(self, rows: RowsView, budget: Budget) -> Draft:
        draft = super().propose(rows, budget)
        if self._looked_for:
            # Verification would resume at another sublayer for each set, with another recorded pass each time.
            draft = replace(draft, resume=None)
        if not draft.steps or self._rounds < self._due or rows.rows_apart:
            return draft
        return replace(draft, behind=self._drafter.trial(list(self.family), self._depth, rows))

    def learn(self, rows: RowsView, draft: Draft, target: PassResult, verdict: Verdict) -> None:
        super().learn(rows, draft, target, verdict)
        self._rounds += draft.steps > 0
        trial, tried = draft.behind, target.behind
        if not isinstance(trial, Trial) or not isinstance(tried, Tried):
            return
        first = trial.first
        read = [
            (place, token, list(verdict.rows[number].path[: first + token + 1]) == [*range(first + token + 1)])
            for place, number in enumerate(rows.running)
            for token in range(tried.chances.shape[1])
            if number in verdict.rows
        ]
        # Rejected tokens are not part of the text. But a path must also lose its place if no token of it is accepted.
        standing = [(place, token) for place, token, accepted in read if accepted]
        self._count(tried, standing or [(place, token) for place, token, _ in read if not token])
        self._choose(rows)

    def _count(self, tried: Tried, read: Sequence[tuple[int, int]]) -> None:
        """Count the result of a trial at some tokens, each given by its row's place and its number."""
        places, tokens = map(list, zip(*read, strict=True))
        chances: list[float] = tried.chances[places, tokens].mean(0).tolist()
        for worth, chance in zip(self.family.values(), chances[1 + self._looked_for :], strict=True):
            worth.count(chance, len(read))
        if not self._looked_for:
            return
        self.votes = [_MEMORY * votes for votes in self.votes]
        for place, token in read:
            for layer in tried.found(place, token):
                self.votes[layer] += 1
        order = sorted(range(self._depth), key=lambda layer: -self.votes[layer])
        voted = LayerSkip(layers=sorted(order[: self._looked_for]))
        self._added = voted not in self.family
        self._add(self._exchanged())
        self._add(voted)

    def _exchanged(self) -> LayerSkip:
        """Return the chosen skip set with one layer exchanged for another, a new pair in each call."""
        out = sorted(each.layer for each in self.chosen.path(self._depth).skipped if each.part is Part.ATTENTION)
        others = [layer for layer in range(self._depth) if layer not in out]
        self._exchanges += 1
        # The layer is far from the last one, and in the end every layer comes up.
        out[self._exchanges % len(out)] = others[int(self._exchanges * 0.618 * len(others)) % len(others)]
        return LayerSkip(layers=sorted(out))

    def _add(self, path: LayerPathDrafter) -> None:
        """Add a path to the family; if that is full, in place of the worst path other than the chosen one."""
        if path in self.family:
            return
        if len(self.family) == FAMILY:
            rates = self._rates()
            del self.family[min(rates.keys() - {self.chosen}, key=rates.__getitem__)]
        self.family[path] = self._unknown(path)

    def _rates(self) -> dict[LayerPathDrafter, float]:
        """Return the acceptance rate of each path, shrunk towards the mean of all paths."""
        worths = self.family.values()
        mean = sum(each.accepted for each in worths) / sum(each.tokens for each in worths)
        return {path: (each.accepted + _PRIOR * mean) / (each.tokens + _PRIOR) for path, each in self.family.items()}

    def _choose(self, rows: RowsView) -> None:
        """Choose the path that commits most for its cost, at the best draft length for each path."""

        def speed(path: LayerPathDrafter) -> float:
            steps, rate = self.family[path].cost / self._first_cost, rates[path]
            return max(
                sum(rate**token for token in range(length + 1)) / rows.controller.price(steps * length, length)
                for length in range(1, rows.controller.most.depth + 1)
            )

        rates = self._rates()
        best = max(self.family, key=speed)
        stays = speed(best) < _CLEAR * speed(self.chosen)
        self._gap = min(2 * self._gap, _LONGEST) if stays and not self._added else self._gap
        self._due = self._rounds + self._gap
        if stays:
            return
        self.chosen, self._path = best, best.path(self._depth)
        if self._looked_for:
            recent = rows.memories.setdefault(self._memory, RecentPaths())
            assert isinstance(recent, RecentPaths)
            recent.use(self._path, rows)


@drafter(
    "del",
    argument=":E-F",
    example="del:2-6",
    help="early exit at a layer from E to F, which is chosen every few rounds",
)
@dataclass(frozen=True)
class ChosenExit(ChosenPath):
    """Drafts from an exit layer that adapts to the text, as in DEL (Zarch et al., 2025, arXiv 2504.05598).

    The controller chooses the draft length, as for all drafts.

    Attributes:
        earliest: the first exit layer.
        latest: the last exit layer.
    """

    earliest: int
    latest: int

    def __post_init__(self) -> None:
        if type(self.earliest) is not int or type(self.latest) is not int or self.earliest >= self.latest:
            raise DraftConfigError(
                f"exits are two integers, the earlier one first, got {shown(self.earliest)} and {shown(self.latest)}; "
                "write e.g. ChosenExit(2, 6)"
            )

    def family(self, depth: int) -> Sequence[LayerPathDrafter]:
        middle = (self.earliest + self.latest) // 2
        return [
            EarlyExit(layer) for layer in (middle, *range(self.earliest, middle), *range(middle + 1, self.latest + 1))
        ]

    def trial(self, family: Sequence[LayerPathDrafter], depth: int, rows: RowsView) -> Trial:
        return ExitTrial(
            tokens_of(rows), rows.greedy, tuple(each.layer for each in family if isinstance(each, EarlyExit))
        )

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> ChosenExit:
        first, _, last = (argument or "").partition("-")
        return cls(read_number(first), read_number(last))

    @property
    def spelling(self) -> str:
        return f"del:{self.earliest}-{self.latest}"


@drafter(
    "clasp",
    argument=":M",
    example="clasp:8",
    help="all but M layers, which are chosen every few rounds",
)
@dataclass(frozen=True)
class ChosenSkips(ChosenPath):
    """Drafts with a skip set that adapts to the text, as in CLaSp (Chen et al., 2025, arXiv 2505.24196).

    Attributes:
        layers: size M of the skip set. The first set spreads its layers evenly.
    """

    layers: int

    @property
    def looked_for(self) -> int:
        return self.layers

    @property
    def own_nodes(self) -> int:
        return TOKENS * (1 + self.layers + FAMILY)

    def family(self, depth: int) -> Sequence[LayerPathDrafter]:
        if type(self.layers) is not int or not 1 <= self.layers <= depth - 2:
            raise DraftConfigError(
                f"a draft leaves out {shown(self.layers)} layers; this model has {depth}, choose 1..{depth - 2}"
            )
        # The first layer and the last one are never skipped.
        inner = depth - 2
        return [LayerSkip(layers=[1 + (2 * each + 1) * inner // (2 * self.layers) for each in range(self.layers)])]

    def trial(self, family: Sequence[LayerPathDrafter], depth: int, rows: RowsView) -> Trial:
        skipped = tuple(frozenset(each.layer for each in path.path(depth).skipped) for path in family)
        return PathTrial(tokens_of(rows), rows.greedy, self.layers, skipped)

    @classmethod
    def spelled(cls, name: str, argument: str | None) -> ChosenSkips:
        return cls(read_number(argument))

    @property
    def spelling(self) -> str:
        return f"clasp:{self.layers}"
