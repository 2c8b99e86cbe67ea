"""Decodes by llama.cpp what it is asked on standard input, a line of JSON each, and answers how long that took.

    python benchmarks/llama_cpp_worker.py FILE.gguf THREADS CONTEXT

`decoding.py` runs it, with whatever Python has llama-cpp-python: it needs nothing else.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp


def main() -> None:
    """Serve until standard input ends."""
    file, threads, context = sys.argv[1:]
    decoder = Decoder(Path(file), int(threads), int(context))
    print(json.dumps({"system": llama_cpp.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(decoder.decoded(json.loads(line))), flush=True)


class Decoder:
    """A model, in llama.cpp's own settings but for the threads."""

    def __init__(self, file: Path, threads: int, context: int) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        options = llama_cpp.llama_context_default_params()
        # A prompt is one batch.
        options.n_ctx = options.n_batch = context
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)

    def decoded(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do a job: `ids` of a prompt, `tokens` to add, `temperature` (0: greedy), `seed`.

        Returns `text`, `seconds` of the tokens after the first, and of the `whole`.
        """
        sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if job["temperature"]:
            llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_temp(job["temperature"]))
            llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_dist(job["seed"]))
        else:
            llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_greedy())
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        begun = time.perf_counter()
        text, started = [self._next(sampler, job["ids"])], time.perf_counter()
        while len(text) < job["tokens"]:
            text.append(self._next(sampler, text[-1:]))
        ended = time.perf_counter()
        llama_cpp.llama_sampler_free(sampler)
        return {"text": text, "seconds": ended - started, "whole": ended - begun}

    def _next(self, sampler: Any, ids: list[int]) -> int:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        failed = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        assert not failed, failed
        return int(llama_cpp.llama_sampler_sample(sampler, self._context, -1))


_SILENT = llama_cpp.llama_log_callback(lambda *_: None)


if __name__ == "__main__":
    main()
