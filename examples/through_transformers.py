"""The other way in: `model.generate` with a wrapped model as its `custom_generate`."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.measure.embedded import checkpoint_folder

folder = checkpoint_folder()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("from collections import ", return_tensors="pt").input_ids

spec = selfspec.wrap(model, draft=selfspec.drafts.EarlyExit(layer=4))
drafted = model.generate(prompt, custom_generate=spec, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)

print(tokenizer.decode(drafted.sequences[0], skip_special_tokens=True))
assert torch.equal(drafted.sequences, model.generate(prompt, max_new_tokens=40, do_sample=False))
assert drafted.stats.accepted > 0
assert spec.unwrap() is model
