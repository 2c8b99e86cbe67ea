"""Locate the weights of a GGUF file under the names of `transformers`, as they lie there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from selfspec.errors import CheckpointError, UnsupportedModelError
from selfspec.formats.gguf import PLAIN, Gguf
from selfspec.kernels.native import BLOCKS
from selfspec.model.gguf import GgufTensor, read_header
from selfspec.model.registry import auto_class
from selfspec.placement.stored import StoredTensor, StoredWeight, WeightFiles

# Of rotary positions, which `transformers` makes by itself: 1 where nothing is scaled.
_FACTORS = "rope_freqs.weight"
_REMEDY = "give a checkpoint of transformers, or load the file with transformers, which makes all of its weights dense"


def gguf_weights(file: Path, config: PreTrainedConfig, files: WeightFiles) -> dict[str, StoredWeight | Tensor]:
    """Locate the weights of a file by the names that a model of `config` has them under.

    Matrices stay where they lie. What `transformers` computes of small tensors is computed, such as norms less 1.

    Raises:
        CheckpointError: the file is damaged or truncated, or has a type that there are no kernels for.
        UnsupportedModelError: weights of this architecture are not only renamed, or put in another order.
    """
    import gguf

    header, size = read_header(file), file.stat().st_size
    with torch.device("meta"):
        empty: PreTrainedModel = auto_class(config).from_config(config)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    try:
        names: Mapping[str, str] = get_gguf_hf_weights_map(_Named(empty, empty.base_model_prefix), processor)
    # It knows fewer architectures than there are configurations for.
    except NotImplementedError as error:
        raise UnsupportedModelError(f"{file} is of the architecture {header.architecture!r}; {_REMEDY}") from error
    known = {each.value: each.name for each in gguf.GGMLQuantizationType}
    unknown = sorted({known.get(each.kind, str(each.kind)) for each in header.tensors.values()} - {*PLAIN, *BLOCKS})
    if unknown:
        raise CheckpointError(
            f"{file} has weights of the type {unknown[0]}; there are kernels for {', '.join([*PLAIN, *BLOCKS])}: "
            "take a file of one of these, such as Q4_K_M or Q8_0"
        )
    found: dict[str, StoredWeight | Tensor] = {}
    for name, tensor in header.tensors.items():
        located = _located(file, tensor, known[tensor.kind])
        if located.start + located.nbytes > size:
            raise CheckpointError(f"{file} is truncated: it ends before {name} does; copy or download it again")
        if name == _FACTORS and bool((files.mapped(located).view(torch.float32) == 1).all()):
            continue
        if name not in names:
            raise UnsupportedModelError(f"{file} has {name}, which {type(empty).__name__} has no place for; {_REMEDY}")
        found[names[name]] = _weight(processor, name, tensor, known[tensor.kind], located, files)
    return found


class _Named:
    """Names the weights of a model, and those of its base, which some files have; `transformers` asks every module."""

    def __init__(self, model: PreTrainedModel, prefix: str | None) -> None:
        self.config, self._model, self._prefix = model.config, model, prefix

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights by name."""
        state: dict[str, Tensor] = self._model.state_dict()
        return state

    def named_children(self) -> list[tuple[str, _Named]]:
        """Return the base."""
        return [] if self._prefix is None else [(self._prefix, _Named(self._model.base_model, None))]


def _located(file: Path, tensor: GgufTensor, kind: str) -> StoredTensor:
    """Locate a tensor as bytes, `[..., bytes of a row]`."""
    *rows, inputs = tensor.shape
    weights, nbytes = (1, PLAIN[kind].itemsize) if kind in PLAIN else (BLOCKS[kind].weights, BLOCKS[kind].nbytes)
    return StoredTensor(file, tensor.start, (*rows, inputs // weights * nbytes), torch.uint8)


def _weight(
    processor: TensorProcessor, name: str, tensor: GgufTensor, kind: str, located: StoredTensor, files: WeightFiles
) -> StoredWeight | Tensor:
    parts, shape = {"blocks": located}, torch.Size(tensor.shape)
    if len(shape) == 2:
        # What happens to rows is seen by one number for each.
        rows = np.arange(shape[0], dtype=np.float32)[:, None]
        seen = _processed(processor, name, rows)
        if seen is not None and seen.shape == rows.shape:
            heads = _heads(seen[:, 0].astype(np.int64))
            if heads is not None:
                return StoredWeight(shape, torch.float32, parts, Gguf(kind, heads))
        if seen is not None and seen.shape == rows.T.shape and np.array_equal(seen, rows.T):
            return StoredWeight(shape, torch.float32, parts, Gguf(kind), transposed=True)
    values = None
    if kind in PLAIN:
        values = _processed(processor, name, files.mapped(located).view(PLAIN[kind]).float().numpy())
    if values is None:
        raise UnsupportedModelError(f"{located.file} has {name} in blocks that are not put in order by rows; {_REMEDY}")
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _processed(processor: TensorProcessor, name: str, values: Any) -> Any:
    """Return what `transformers` makes of the values of a tensor; None: it has no way to for this shape."""
    try:
        made = processor.process(weights=values, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    except (ValueError, KeyError, IndexError):
        return None
    return made.weights if made.name == name else None


def _heads(order: Any) -> int | None:
    """Return the heads whose rows lie in pairs where units have this order; 0: in order; None: in some other order."""
    count = len(order)
    if np.array_equal(order, np.arange(count)):
        return 0
    half = int(np.argmax(order == 1))
    if half < 1 or count % (2 * half):
        return None
    heads = count // (2 * half)
    paired = np.arange(count).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)
    return heads if np.array_equal(order, paired) else None
