# %% [markdown]
# Which layers can a model do without, and what is it worth? Run it as a script, or cell by cell in an editor.

# %% The embedded model, and the beginnings of four Python files.
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import selfspec
from selfspec.measure.embedded import PROMPTS, checkpoint_folder

logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())

# %% Every exit and every single sublayer, judged by teacher forcing on text that the model writes itself; two drafts
# are confirmed by real generation. With `pricing="measured"` costs are timed on this machine.
table = selfspec.ablate(
    model,
    PROMPTS,
    tokenizer=tokenizer,
    drafts=["exits", "sublayers"],
    temperatures=[1.0],
    draft_lengths=[1, 2, 4],
    max_new_tokens=24,
    confirm=2,
    pricing="weights",
)

# %% What promises most.
best = table[table.best_length == True].sort_values("predicted_speedup", ascending=False)  # noqa: E712
print(best[["draft", "draft_length", "alpha", "c", "predicted_speedup"]].head(8).to_string(index=False))

# %% Which layers are missed most: acceptance without each attention and each MLP.
single = table[(table.kind == "skip") & (table.draft_length == 1)]
print(single.set_index("draft").alpha.sort_values().round(2).head(6).to_string())

# %% Estimates beside what generation made of them.
same = ["draft", "draft_length"]
confirmed = table[table.measured == "generation"].merge(
    table[table.measured == "teacher forcing"], on=same, suffixes=("", "_estimated")
)
print(confirmed[[*same, "acceptance_rate_estimated", "acceptance_rate", "speedup"]].round(2).to_string(index=False))
assert (confirmed.acceptance_rate > 0).all()
