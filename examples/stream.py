"""Stream tokens as each round commits them, and see what became of its draft."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.measure.embedded import checkpoint_folder

folder = checkpoint_folder()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("def __init__(self, name):\n", return_tensors="pt").input_ids

spec = selfspec.wrap(model, draft=selfspec.drafts.EarlyExit(layer=4), draft_length=3)
options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_k": None, "seed": 0}
accepted, tokens = 0, prompt[0].tolist()
for chunk in spec.stream(prompt, **options):
    row = chunk.rows[0]
    print(f"drafted {tokenizer.decode(list(row.draft))!r:24} {row.accepted} accepted, committed", end=" ")
    print(repr(tokenizer.decode(list(row.tokens))))
    accepted += row.accepted
    tokens += row.tokens
assert accepted > 0
# Rounds make up the text of a call that is not streamed.
assert tokens == spec.generate(prompt, **options).sequences[0].tolist()
