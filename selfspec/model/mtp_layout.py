"""How a checkpoint names its modules for multi-token prediction (MTP), and what these compute."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class MtpLayout:
    """Where the parts of an MTP module lie in an architecture's checkpoints.

    Module i makes h' = block(projection [embedding norm (e) ; hidden norm (h)]) of a state h and the embedding e of the
    token after it; norm (h') goes through the model's head. In names `{i}` is the number of a module, and `{n}` the
    same counted on from the model's layers; what a checkpoint has before a name is left out.

    Attributes:
        embedding: its norm over embeddings.
        hidden: its norm over states.
        projection: a linear layer.
        norm: its final norm; None: it has none.
        block: what the names of its decoder layer begin with.
        counts: fields of the config that say how many modules there are; the first that is there counts.
        hidden_first: whether the projection reads [h ; e].
        reads: which state of the model it reads: before or after the final norm.
        recycles: which state of its own it goes on from.
        config: what the config of its layer has other than the model's; lists are for one layer.
    """

    embedding: str = "layers.{n}.enorm"
    hidden: str = "layers.{n}.hnorm"
    projection: str = "layers.{n}.eh_proj"
    norm: str | None = "layers.{n}.shared_head.norm"
    block: str = "layers.{n}."
    counts: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    hidden_first: bool = False
    reads: Literal["last", "normed"] = "normed"
    recycles: Literal["last", "normed"] = "normed"
    config: tuple[tuple[str, Any], ...] = ()

    def promised(self, config: object) -> int:
        """How many modules a config says there are; 0 where it says nothing."""
        found = (getattr(config, name, None) for name in self.counts)
        return next((count for count in found if type(count) is int), 0)

    def renamed(self, names: Iterable[str], depth: int, module: int = 0) -> dict[str, str]:
        """Map names of a module's weights to `embedding`, `hidden`, `projection`, `norm` and `block.`, each and an end.

        Args:
            names: of a checkpoint.
            depth: layers of the model.
            module: its number.

        Returns:
            By the checkpoint's names; empty where it has no such module.
        """
        listed = list(names)
        places = {part: self._at(getattr(self, part), depth, module) for part in ("embedding", "hidden", "projection")}
        norms = re.compile(rf"(?:.*\.)?{re.escape(places['embedding'])}\.weight")
        first = next((name for name in listed if norms.fullmatch(name)), None)
        if first is None:
            return {}
        before = first.removesuffix(f"{places['embedding']}.weight")
        if self.norm is not None:
            places["norm"] = self._at(self.norm, depth, module)
        found = {f"{before}{place}{end}": part + end for part, place in places.items() for end in (".weight", ".bias")}
        block = before + self._at(self.block, depth, module)
        inside = {name: "block." + name.removeprefix(block) for name in listed if name.startswith(block)}
        # The embeddings and the head are the model's, of which some checkpoints have a copy here.
        rest = {
            name: other
            for name, other in inside.items()
            if name not in found and not other.startswith(("block.shared_head.", "block.embed_tokens."))
        }
        return {name: found[name] for name in listed if name in found} | rest

    @staticmethod
    def _at(place: str, depth: int, module: int) -> str:
        return place.format(i=module, n=depth + module)
