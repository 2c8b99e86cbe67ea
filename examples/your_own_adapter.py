"""Declare an architecture selfspec has never heard of, and see that drafts are right and its text is its own."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

import selfspec
from selfspec.measure.teacher_forced import draft_step_logits


# The made-up architecture: attention and MLP side by side, under names of their own, two values from the MLP.
class Perceptron(LlamaMLP):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Block(LlamaDecoderLayer):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        nn.Module.__init__(self)
        self.norm = LlamaRMSNorm(config.hidden_size)
        self.look, self.think = LlamaAttention(config, index), Perceptron(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.norm(hidden_states)
        looked: Tensor = self.look(hidden_states=normed, **kwargs)[0]
        thought: Tensor = self.think(normed)[0]
        return hidden_states + looked + thought


class MadeUpConfig(LlamaConfig):
    model_type = "made_up"


class MadeUpForCausalLM(LlamaForCausalLM):
    config_class = MadeUpConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.post_init()


torch.manual_seed(0)
config = MadeUpConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    initializer_range=0.3,
)
model = MadeUpForCausalLM(config).double().eval()

# All that has to be said of it.
adapter = selfspec.Adapter(model_types=("made_up",), attention="look", mlp="think", mlp_returns=2)


# Each draft, and the linears without which the model is what drafts.
drafts = {
    selfspec.drafts.EarlyExit(layer=3): ["3.look.o_proj", "3.think.down_proj"],
    selfspec.drafts.LayerSkip(attention=[1], mlp=[2]): ["1.look.o_proj", "2.think.down_proj"],
    selfspec.drafts.LayerSkip(layers=[2]): ["2.look.o_proj", "2.think.down_proj"],
}
prompt = torch.tensor([[7, 11, 13, 17, 19, 23, 29, 31]])
plain = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
for draft, left_out in drafts.items():
    # A wrong declaration shows here, in what drafts, and not in the text.
    pruned = copy.deepcopy(model)
    for name in left_out:
        nn.init.zeros_(pruned.model.layers.get_submodule(name).weight)
    drafted = draft_step_logits(model, adapter, draft, prompt)
    torch.testing.assert_close(drafted, pruned(prompt).logits)

    spec = selfspec.wrap(model, draft, draft_length=2, adapter=adapter)
    out = spec.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(out.sequences, plain)
    assert out.stats.accepted > 0
    print(f"{draft}: {out.stats.mean_accepted_length:.2f} tokens per pass of the full model")
