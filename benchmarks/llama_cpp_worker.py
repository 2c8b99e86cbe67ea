"""Decodes by llama.cpp what it is asked on standard input, a line of JSON each, and answers how long that took.

`beside_llama_cpp.py` runs it, with whatever Python has llama.cpp: it needs nothing else of the project.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

_CONTEXT = 512


def main() -> None:
    """Serve until standard input ends."""
    folder, precision, threads = sys.argv[1:]
    with tempfile.TemporaryDirectory() as to:
        file = Path(to) / "model.gguf"
        write_gguf(Path(folder), file, gguf.GGMLQuantizationType[precision])
        decoder = Decoder(file, int(threads))
    print(json.dumps({"system": llama_cpp.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(decoder.decoded(json.loads(line))), flush=True)


def write_gguf(folder: Path, to: Path, precision: gguf.GGMLQuantizationType) -> None:
    """Write a llama that is kept in float32, without its tokenizer. Norms stay in float32, as llama.cpp keeps them."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama", config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _in_pairs(weight, heads if "q_proj" in name else kv_heads)
        kept = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else precision
        writer.add_tensor(
            names.get_name(name, (".weight",)), np.ascontiguousarray(gguf.quantize(weight, kept)), raw_dtype=kept
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_pairs(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Units of a head in llama.cpp's order: those that are rotated together lie side by side, not half a head apart."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


class Decoder:
    """A model, in llama.cpp's own settings but for the threads.

    Args:
        file: GGUF.
        threads: of every pass.
    """

    def __init__(self, file: Path, threads: int) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = _CONTEXT
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)

    def decoded(self, job: dict[str, Any]) -> dict[str, Any]:
        """What a job gave and took.

        Args:
            job: `ids` of a prompt; `tokens`, how many to add; `temperature`, 0 for greedy text; `seed`.

        Returns:
            `text`, and `seconds` of the tokens after the first.
        """
        sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if job["temperature"]:
            llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_temp(job["temperature"]))
            llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_dist(job["seed"]))
        else:
            llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_greedy())
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        text, started = [self._next(sampler, job["ids"])], time.perf_counter()
        while len(text) < job["tokens"]:
            text.append(self._next(sampler, text[-1:]))
        seconds = time.perf_counter() - started
        llama_cpp.llama_sampler_free(sampler)
        return {"text": text, "seconds": seconds}

    def _next(self, sampler: Any, ids: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        failed = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        assert not failed, failed
        return int(llama_cpp.llama_sampler_sample(sampler, self._context, -1))


_SILENT = llama_cpp.llama_log_callback(lambda *_: None)


if __name__ == "__main__":
    main()
