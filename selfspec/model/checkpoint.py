"""Load models and tokenizers from a folder or the hub, checked before weights are read; no pickles."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from selfspec.arguments import shown
from selfspec.device import has_doubles
from selfspec.errors import CheckpointError, SelfSpecError, UnsupportedOptionError
from selfspec.files.json_text import read_object
from selfspec.kernels.large_pages import move_weights
from selfspec.model.gguf import config_of, is_gguf, tokenizer_of
from selfspec.model.registry import adapter_for, auto_class, check_type

DtypeName = Literal["auto", "float32", "float64", "bfloat16", "float16"]
"""Dtype of weights and computation; "auto" is the checkpoint's own."""

PACKED = "packed.safetensors"
"""The file of a folder whose weights `selfspec pack` packed."""

CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_DISTRIBUTED = "shard-*-model-*-of-*.safetensors"
# Other files beside these may have the same weights in another layout.
_DOWNLOADED = ["*.json", "model*.safetensors", "*.jinja", "tokenizer*", "*.model", "vocab*", "merges.txt"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_JSON_FILES = (CONFIG, "generation_config.json", "tokenizer_config.json")
# Smaller weights load too fast for a progress bar.
_BAR_FROM_BYTES = 2**30


def load_to_device(
    name: str, dtype: torch.dtype | DtypeName = "auto", device: torch.device | str = "auto"
) -> PreTrainedModel:
    """Load the model of a checkpoint, in evaluation mode, to a device."""
    place, config, folder = find_device(device), read_config(name), local_folder(name)
    if folder is not None:
        check_weight_files(weight_files(folder, config))
    model = load_model(name, config, dtype).to(place)
    move_weights(model)
    return model


def find_device(device: torch.device | str | int) -> torch.device:
    """Return the device of a name or number; "auto" is the first CUDA GPU if there is one, else the CPU."""
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = isinstance(device, torch.device) or type(device) in (str, int)
    try:
        found = torch.device(device) if named else None
    except RuntimeError:
        found = None
    if found is None:
        raise UnsupportedOptionError(f"{shown(device)} is no device; choose cpu, cuda, cuda:1, ... or auto")
    try:
        torch.empty(0, device=found)
    # An absent device is an AssertionError or a RuntimeError, by backend.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedOptionError(
            f"device {str(device)!r} is not available here ({_one_line(error)}); choose cpu or auto"
        ) from error
    if found.type == "meta":
        raise UnsupportedOptionError("device 'meta' computes nothing; choose cpu or auto")
    check_device(found)
    return found


def check_device(device: torch.device) -> None:
    """Refuse a device on which nothing can be drawn or judged."""
    if not has_doubles(device):
        raise UnsupportedOptionError(
            f"device {str(device)!r} has no float64, in which drafts are drawn and judged; choose cpu"
        )


def read_config(name: str) -> PreTrainedConfig:
    """Read the configuration of a checkpoint, without its weights and tokenizer."""
    folder = local_folder(name)
    if folder is not None and is_gguf(folder):
        return _config_of_gguf(folder)
    if folder is None:
        check_on_hub(name, CONFIG)
    else:
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder} has no config.json; give the folder of a transformers checkpoint")
        for file in _JSON_FILES:
            if (folder / file).is_file():
                read_object(folder / file, CheckpointError)
    try:
        described = PreTrainedConfig.get_config_dict(_source(name))[0]
    except (OSError, ValueError) as error:
        if folder is not None:
            raise CheckpointError(
                f"the config.json of {name!r} cannot be read ({_one_line(error)}); copy it from the original again"
            ) from error
        raise CheckpointError(
            f"there is no folder {name!r} here, and the model hub did not give it ({_one_line(error)}); check the "
            "name, the network and, for a gated model, your login, or download it and give the folder"
        ) from error
    model_type = described.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"the config.json of {name!r} names no model_type; copy it from the original again")
    check_type(model_type, "auto_map" in described)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(_source(name), trust_remote_code=False)
    # Field validation raises other types.
    except Exception as error:
        raise CheckpointError(
            f"the config.json of {name!r} cannot be used ({_one_line(error)}); copy it from the original again"
        ) from error
    adapter_for(config)
    return config


def _config_of_gguf(file: Path) -> PreTrainedConfig:
    try:
        config = config_of(file)
    except SelfSpecError:
        raise
    # Of an architecture that transformers does not read.
    except Exception as error:
        raise CheckpointError(
            f"the configuration in {file} cannot be used ({_one_line(error)}); give a checkpoint of transformers"
        ) from error
    check_type(config.model_type)
    adapter_for(config)
    return config


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint."""
    folder = local_folder(name)
    if folder is not None and is_gguf(folder):
        try:
            return tokenizer_of(folder)
        except Exception as error:
            raise CheckpointError(
                f"the tokenizer in {folder} cannot be used ({_one_line(error)}); give a checkpoint of transformers"
            ) from error
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(_source(name), trust_remote_code=False)
    # The tokenizers library raises plain Exception for a broken file.
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer of {name!r} cannot be loaded ({_one_line(error)}); copy tokenizer.json and "
            "tokenizer_config.json from the original again"
        ) from error
    return tokenizer


def load_model(
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype | DtypeName,
    tensors: Mapping[str, Tensor] | None = None,
    kind: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """Load a model with `transformers`, which renames, casts, joins and splits tensors of the files.

    `tensors`, by name in the files, replace the files; then `kind` may give the model's class, else `config` says it.
    """
    options = {
        "dtype": dtype if isinstance(dtype, torch.dtype) or dtype == "auto" else getattr(torch, dtype),
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    try:
        if tensors is None:
            folder = local_folder(name)
            files = [] if folder is None else weight_files(folder, config)
            # Downloads and large folders keep their progress bar.
            small = folder is not None and sum(file.stat().st_size for file in files) < _BAR_FROM_BYTES
            with without_progress_bar() if small else nullcontext():
                model, report = auto_class(config).from_pretrained(
                    _source(name), config=config, use_safetensors=True, trust_remote_code=False, **options
                )
        else:
            if kind is None:
                with torch.device("meta"):
                    empty = auto_class(config).from_config(copy.deepcopy(config))
                # For a composite configuration it may be the text model's own.
                kind, config = type(empty), config if type(empty.config) is type(config) else empty.config
            with without_progress_bar():
                model, report = kind.from_pretrained(None, config=config, state_dict=tensors, **options)
    except SelfSpecError:
        raise
    # Quantised checkpoints raise errors of their libraries, or of missing libraries.
    except Exception as error:
        raise CheckpointError(f"the weights of {name!r} cannot be loaded: {_one_line(error)}") from error
    _check_complete(name, model, report)
    loaded: PreTrainedModel = model
    return loaded


def _check_complete(name: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Refuse a model that a checkpoint does not fill, by the `output_loading_info` of `transformers`."""
    # transformers fills tensors that are missing or of another shape with random numbers.
    missing = sorted(report["missing_keys"])
    misfits = sorted(f"{key} is {found} and not {wanted}" for key, found, wanted in report["mismatched_keys"])
    for what, wrong in (("missing", missing), ("of another shape", misfits)):
        if wrong:
            raise CheckpointError(
                f"{len(wrong)} tensors of {type(model).__name__} are {what} in the weights of {name!r} (first: "
                f"{wrong[0]}); they belong to another config.json or were saved incompletely: copy both again"
            )


def local_folder(name: str) -> Path | None:
    """Return the folder, or the GGUF file, that `name` means; None for a name on the hub."""
    path = Path(name).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists():
        raise CheckpointError(
            f"{name} is a file; give the folder that holds config.json and model.safetensors, or a .gguf file"
        )
    if not name or name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise CheckpointError(
            f"folder {name!r} does not exist; give a folder with config.json, model.safetensors and tokenizer.json, "
            "or a name on the model hub such as org/model"
        )
    return None


def _source(name: str) -> str:
    """Return the name or path to give to `transformers`."""
    return str(local_folder(name) or name)


def check_weight_files(files: Sequence[Path]) -> None:
    """Check that every weight file is as long as its header says; read only the headers."""
    for file in files:
        if file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{file} is a Git LFS pointer and not the weights; run `git lfs pull` in its folder")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is truncated or corrupt ({error}); copy or download it again") from error


def weight_files(folder: Path, config: PreTrainedConfig) -> list[Path]:
    """Return the safetensors files of a checkpoint that `transformers` would read."""
    if is_gguf(folder):
        raise CheckpointError(
            f"{folder} is a GGUF file, whose weights stay in its blocks; give the checkpoint that it was made from"
        )
    chosen = getattr(config, "transformers_weights", None)
    names = (_WEIGHTS, _WEIGHTS_INDEX) if chosen is None else (str(chosen),)
    if any(".." in Path(name).parts or Path(name).is_absolute() for name in names):
        raise CheckpointError(
            f"the config.json of {folder} names weights that are not in it ({chosen}); copy both again"
        )
    if next(folder.glob(_DISTRIBUTED), None) is not None:
        raise CheckpointError(
            f"{folder} has its weights as a distributed checkpoint ({_DISTRIBUTED}); load it once with transformers "
            "and save it whole: save_pretrained(another folder)"
        )
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is not None:
        # A configuration class may name further files for parts of a model.
        parts = [folder / name for name in getattr(type(config), "extra_files", ())]
        return [*(_shards(found) if found.suffix == ".json" else [found]), *filter(Path.is_file, parts)]
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights as pickles only ({pickles[0]}), which can run any code when loaded; convert "
            "them once, if you trust them: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    if (folder / PACKED).is_file():
        raise CheckpointError(
            f"{folder} has packed weights alone ({PACKED}), which are not read here; give the checkpoint that they "
            "were packed from"
        )
    raise CheckpointError(f"{folder} has no weights ({names[0]}); copy them from the original")


def dtype_of_index(folder: Path, config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype in an index of shards if the configuration names none; None: use the configuration's, if any."""
    index = folder / str(getattr(config, "transformers_weights", None) or _WEIGHTS_INDEX)
    if config.dtype is not None or (folder / _WEIGHTS).is_file() or index.suffix != ".json" or not index.is_file():
        return None
    metadata = read_object(index, CheckpointError).get("metadata")
    named = getattr(torch, str(metadata.get("dtype")), None) if isinstance(metadata, dict) else None
    return named if isinstance(named, torch.dtype) else None


def _shards(index: Path) -> list[Path]:
    weight_map = read_object(index, CheckpointError).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(each, str) for each in weight_map.values())
    ):
        raise CheckpointError(f"{index} names no weights; copy it from the original again")
    shards = [index.parent / shard for shard in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing)}; copy them too"
        )
    return shards


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Hide the progress bars of `transformers`."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


_SECONDS = 10.0


def downloaded(name: str) -> Path:
    """Download what a model on the hub is loaded from, unless the cache has it; return its folder there."""
    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED))
    # The type of network errors depends on the underlying library.
    except Exception as error:
        raise CheckpointError(
            f"{name} cannot be downloaded ({_one_line(error)}); check the network and the room on the disk of the cache"
        ) from error


def check_on_hub(name: str, file: str) -> None:
    """Refuse a name if neither the cache nor the hub has its `file`; makes one request, of at most ten seconds."""
    try:
        if try_to_load_from_cache(name, file) is None:
            get_hf_file_metadata(hf_hub_url(name, file), timeout=_SECONDS)
    # The type of network errors depends on the underlying library.
    except Exception as error:
        raise CheckpointError(f"there is no folder {name!r} here, and {_reason(file, error)}") from error


def _reason(file: str, error: Exception) -> str:
    """Say why the hub does not provide the file, and what to do."""
    # GatedRepoError is a subclass of RepositoryNotFoundError.
    known: dict[type[Exception], str] = {
        HFValidationError: "it is no name on the model hub; check the path",
        GatedRepoError: "on the model hub it is gated: accept its terms at its page, and log in with `hf auth login`",
        RepositoryNotFoundError: "the model hub has no public model of this name; check the spelling or, for a private "
        "one, your login",
        EntryNotFoundError: f"on the model hub it has no {file}: is it a transformers checkpoint?",
        OfflineModeIsEnabled: "HF_HUB_OFFLINE forbids asking the model hub; check the path, or unset it",
        Exception: f"the model hub cannot be reached ({_one_line(error)}); check the path or the network, or give a "
        "folder",
    }
    return next(reason for kind, reason in known.items() if isinstance(error, kind))
