"""Several prompts at once: each row advances by what the model accepts of its own draft."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.measure.embedded import checkpoint_folder

folder = checkpoint_folder()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")  # as generation needs
prompts = tokenizer(["class Stack:\n", "import os\n\ndef walk(", "# A test"], return_tensors="pt", padding=True)

spec = selfspec.wrap(model, draft=selfspec.drafts.EarlyExit(layer=4), draft_length=3)
out = spec.generate(**prompts, max_new_tokens=30, do_sample=False)

for sequence, length in zip(out.sequences, out.lengths, strict=True):
    print(f"{length:3} new tokens:", tokenizer.decode(sequence, skip_special_tokens=True))
print("accepted by depth in the draft:", out.stats.accepted_per_depth)

assert torch.equal(out.sequences, model.generate(**prompts, max_new_tokens=30, do_sample=False))
assert out.stats.accepted > 0
