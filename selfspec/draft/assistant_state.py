"""An assistant's state in a generation: passes over a cache of its own, which follows the committed text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from selfspec.cache.shared_cache import SharedCache
from selfspec.cache.tree import Tree
from selfspec.device import HostCopy, to_device
from selfspec.draft.rows_view import RowsView
from selfspec.model.layer_path import LayerPath
from selfspec.runtime.runner import ModelRunner


class AssistantState:
    """Reads each row's committed text, and draft tokens after it, into the cache of the assistant.

    The committed text alone decides which nodes of a draft to keep: when the next draft begins, the cursor of each row
    moves over the committed nodes, and the row's other committed tokens are read.

    Args:
        runner: runner of the assistant.
        cache: cache of the assistant.
        rows: numbers of the rows of the batch.
        vocabulary: number of the target's logits; the assistant's are cut to it or filled up with -inf.
        weights: bytes of the assistant's weights.
    """

    def __init__(
        self, runner: ModelRunner, cache: SharedCache, rows: Sequence[int], vocabulary: int, weights: int
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._rows = list(rows)
        self._vocabulary = vocabulary
        self._weights = weights
        self._path = LayerPath.full(runner.depth)
        self._tree = Tree.chain(0)
        # Tokens of the draft's nodes read so far, `[rows, nodes]` each; None: the last committed token is not read yet.
        self._drafted: list[HostCopy] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, keys and values."""
        return self._weights + self._cache.most_bytes

    def after_text(self, view: RowsView, tree: Tree) -> Tensor:
        """Read the committed text and begin a draft; return logits after each row's last token, `[rows, 1, vocab]`."""
        self._keep_committed(view)
        self._drop(view.running)
        self._cache.reserve(max(map(view.text_length, self._rows)))
        texts = self._catch_up(view)
        unread = [len(text) - 1 for text in texts]
        tokens = self._tokens(texts, max(unread) + 1)
        logits = self._logits(tokens, first=-1)
        if max(unread):
            self._cache.commit(unread)
        self._cache.open(tree)
        self._tree, self._drafted = tree, [HostCopy(tokens[:, :0])]
        places = to_device(unread, logits.device)[:, None, None]
        return logits.gather(1, places.expand(-1, 1, logits.shape[-1]))

    def after(self, tokens: Tensor, first: int) -> Tensor:
        """Read the next nodes of the draft, `[rows, nodes]`; return the logits after them, `[rows, nodes, vocab]`."""
        assert self._drafted is not None
        self._drafted.append(HostCopy(tokens))
        return self._logits(self._known(tokens), first)

    def _drop(self, running: Sequence[int]) -> None:
        """Drop the rows that the target no longer runs."""
        if self._rows == list(running):
            return
        self._cache.narrow([self._rows.index(row) for row in running])
        self._rows = list(running)

    def _keep_committed(self, view: RowsView) -> None:
        """Move the cursors over the last committed token of the round before and the committed draft tokens."""
        if self._drafted is None:
            return
        runs, texts = torch.cat([each.read() for each in self._drafted], 1).tolist(), self._unread_texts(view)
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

    def _catch_up(self, view: RowsView) -> list[list[int]]:
        """Read the tokens that do not fit into one pass with the last one; return the rest of each row, it included.

        Layers with a recurrent state read all but the last token here: filler of shorter rows would change their state.
        """
        most = self._cache.slack if self._cache.rolls_back_by_cursor else 0
        while True:
            texts = self._unread_texts(view)
            unread = [len(text) - 1 for text in texts]
            if max(unread) <= most:
                return texts
            room = self._cache.capacity - max(self._cache.seq_lens)
            width = min(self._cache.prefill_widths(unread)[0], room)
            counts = [min(count, width) for count in unread]
            self._runner.prefill(self._tokens(texts, width), counts)
            self._cache.commit(counts)

    def _unread_texts(self, view: RowsView) -> list[list[int]]:
        """Return each row's text from its cursor on."""
        cursors = zip(self._rows, self._cache.seq_lens, strict=True)
        return [view.text(row, cursor) for row, cursor in cursors]

    def _tokens(self, texts: Sequence[Sequence[int]], width: int) -> Tensor:
        """Return the first tokens of each text, filled up on the right, `[rows, width]`."""
        rows = [[*text[:width], *[0] * (width - len(text))] for text in texts]
        return self._known(to_device(rows, self._runner.device))

    def _known(self, tokens: Tensor) -> Tensor:
        """Replace tokens that the assistant does not know by one that it knows; it may read any."""
        return tokens.clamp(max=self._runner.vocabulary - 1)

    def _logits(self, tokens: Tensor, first: int) -> Tensor:
        logits = self._runner.logits(self._path, tokens, first=first).logits
        missing = self._vocabulary - logits.shape[-1]
        return pad(logits, (0, missing), value=-torch.inf) if missing else logits
