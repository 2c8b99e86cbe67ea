"""Train exit heads for the embedded model on its own text, in a minute or two, and draft with them."""

import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import selfspec
from selfspec.measure.embedded import PROMPTS, checkpoint_folder
from selfspec.tools.train.recipe import Course, ExitHeadRecipe, Texts
from selfspec.tools.train.run import run

with tempfile.TemporaryDirectory() as folder:
    text, heads = Path(folder) / "beginnings.txt", Path(folder) / "heads"
    text.write_text("\n".join(PROMPTS * 12))

    # The model writes 96 texts on from pieces of these, and its heads learn what it would have said at every token.
    report = run(
        str(checkpoint_folder()),
        Texts(text=[text]),
        Course(steps=60, batch=8, length=48, learning_rate=3e-3),
        ExitHeadRecipe(exits=(2, 3), rank=64, own_texts=96, beginning=8),
        heads,
        observe=lambda step, steps, figures: None,
        device="cpu",
    )
    for name in ("alpha_2", "alpha_3"):
        print(f"{name}: {report['before'][name]:.2f} before, {report['after'][name]:.2f} after")

    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    for draft in (selfspec.drafts.EarlyExit(layer=3), selfspec.drafts.ExitHead.from_pretrained(heads, layer=3)):
        spec = selfspec.wrap(model, draft=draft, draft_length=3)
        stats = spec.generate(ids, max_new_tokens=60, do_sample=False).stats
        assert stats.accepted > 0
        print(f"{type(draft).__name__}: acceptance rate {stats.acceptance_rate:.2f}")
