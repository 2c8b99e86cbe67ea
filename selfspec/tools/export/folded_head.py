"""An exit head as one more decoder layer, whose attention adds nothing and whose MLP is the head's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfspec.draft.exit_head import ExitAdapter
from selfspec.errors import DraftConfigError, UnsupportedModelError

_NORM, _GATE, _UP, _DOWN = ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_REMEDY = "export exit:E without the head"


def folded(adapter: ExitAdapter, layer: nn.Module) -> dict[str, Tensor]:
    """Return weights of a decoder layer that computes what an exit adapter does, by their names within the layer.

    Args:
        adapter: with an untouched residual branch: its `scale` is 1 everywhere.
        layer: of the model; its MLP is a gated one behind an RMS norm, and it adds what its sublayers give.

    Raises:
        UnsupportedModelError: the layers of the model have no such MLP.
        DraftConfigError: the adapter scales the residual branch, or is wider than the MLP.
    """
    weights = {name: weight.detach() for name, weight in layer.state_dict().items()}
    needed = [f"{name}.weight" for name in (_NORM, _GATE, _UP, _DOWN, "self_attn.o_proj")]
    if any(name not in weights for name in needed) or "pre_feedforward_layernorm.weight" in weights:
        raise UnsupportedModelError(
            f"an exit head cannot be folded into a {type(layer).__name__}, which has no gated MLP behind one norm; "
            f"{_REMEDY}"
        )
    if not bool((adapter.scale == 1).all()):
        raise DraftConfigError(
            "this exit head scales the residual stream, which no layer of the model does, so it cannot be folded into "
            f"one; train it with --foldable, or {_REMEDY}"
        )
    rank, width = adapter.gate.weight.shape[0], weights[f"{_GATE}.weight"].shape[0]
    if rank > width:
        raise DraftConfigError(
            f"this exit head is {rank} wide and the MLP of a layer {width}, so it cannot be folded into one; train it "
            f"with --rank {width}, or {_REMEDY}"
        )
    found = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        # Of zeros a norm makes zeros, whatever its weight.
        if name.endswith(("norm.weight", "layernorm.weight")):
            found[name] = torch.ones_like(weight)
    found[f"{_NORM}.weight"] = adapter.norm.weight.detach().to(weights[f"{_NORM}.weight"])
    for name, linear in ((_GATE, adapter.gate), (_UP, adapter.up)):
        found[f"{name}.weight"][:rank] = linear.weight.detach()
    found[f"{_DOWN}.weight"][:, :rank] = adapter.down.weight.detach()
    return found
