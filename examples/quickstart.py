"""Make a checkpoint draft for itself, in three lines, and see that its text is its own."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.measure.embedded import checkpoint_folder

folder = checkpoint_folder()  # any model folder or hub name
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("import os\n\ndef walk(", return_tensors="pt").input_ids

spec = selfspec.wrap(model, draft=selfspec.drafts.EarlyExit(layer=4))
out = spec.generate(prompt, max_new_tokens=60, do_sample=False)

print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
print(f"{out.stats.mean_accepted_length:.2f} tokens per pass of the full model")

plain = model.generate(prompt, max_new_tokens=60, do_sample=False)
assert torch.equal(out.sequences, plain)
assert out.stats.accepted > 0
