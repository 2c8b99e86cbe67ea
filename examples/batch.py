"""Several prompts at once: each row advances by what the model accepts of its own draft."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.demo import checkpoint_folder

folder = checkpoint_folder()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")  # as generation needs
prompts = tokenizer(["class Stack:\n", "import os\n\ndef walk(", "# A test"], return_tensors="pt", padding=True)

spec = selfspec.wrap(model, draft=selfspec.EarlyExit(layer=4))
out = spec.generate(prompts.input_ids, attention_mask=prompts.attention_mask, max_new_tokens=30, do_sample=False)

for sequence, length in zip(out.sequences, out.lengths, strict=True):
    print(f"{length:3} new tokens:", tokenizer.decode(sequence, skip_special_tokens=True))
print("accepted by position in the draft:", out.stats.accepted_per_position)
