"""Chat templates in the shapes that families of models publish, and what these models write when they call tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from helpers import tiny

Calls = Sequence[tuple[str, Mapping[str, Any]]]

# Parts that several have: tools as JSON lines, an answer's thought apart from its text, results of calls.
_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}"
    "{%- endif %}{{ '# Tools\\n\\nYou may call functions. They are described in <tools></tools>:\\n<tools>' }}"
    "{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}{{ '\\n</tools>\\n\\nFor each call, write' }}"
    '{{ \'\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n\' }}'
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
)
_OTHERS = (
    "{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{%- endif %}{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
)
_THOUGHT = (
    "{%- set thought = message.reasoning_content or '' %}{%- set said = message.content %}"
    "{%- if '</think>' in said %}{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
)
_JSON_CALLS = (
    "{%- for call in message.tool_calls or [] %}{%- if (loop.first and said) or not loop.first %}{{ '\\n' }}{%- endif %}"
    '{%- set call = call.function %}{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{%- if call.arguments is string %}{{ call.arguments }}{%- else %}{{ call.arguments | tojson }}{%- endif %}"
    "{{ '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"
)
_XML_CALLS = (
    "{%- for call in message.tool_calls or [] %}{{ '\\n' if said or not loop.first else '' }}"
    "{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{%- for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\\n' }}"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{ '\\n</parameter>\\n' }}{%- endfor %}{{ '</function>\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"
)

HERMES = (
    _TOOLS + "{%- for message in messages %}" + _OTHERS + "{%- elif message.role == 'assistant' %}"
    "{%- set said = message.content %}{{ '<|im_start|>assistant\\n' + said }}"
    + _JSON_CALLS
    + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN_3 = (
    _TOOLS + "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    + _OTHERS
    + "{%- elif message.role == 'assistant' %}"
    + _THOUGHT
    + "{{ '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}{{ said }}"
    + _JSON_CALLS
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
QWEN_CODER = (
    _TOOLS + "{%- for message in messages %}" + _OTHERS + "{%- elif message.role == 'assistant' %}"
    "{%- set said = message.content %}{{ '<|im_start|>assistant\\n' + said }}"
    + _XML_CALLS
    + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
NEMOTRON_3 = (
    _TOOLS
    + "{%- for message in messages %}"
    + _OTHERS
    + "{%- elif message.role == 'assistant' %}"
    + _THOUGHT
    # An old answer without a thought has an empty block, on one line.
    + "{{ '<|im_start|>assistant\\n' }}{%- if thought %}{{ '<think>\\n' + thought + '\\n</think>\\n' }}"
    "{%- else %}{{ '<think></think>' }}{%- endif %}{{ said }}" + _XML_CALLS + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<|im_start|>assistant\\n<think></think>' }}{%- else %}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}{%- endif %}"
)
HERMES_DEFAULT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}"
    "{%- if tools %}{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, please respond with a JSON for a "
    'function call.\\n\\nRespond in the format {"name": function name, "parameters": dictionary of argument name and its '
    "value}.\\n\\n' }}{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}"
    "{{- first + '<|eot_id|>' }}{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}"
    "{%- elif message.tool_calls %}{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}' + '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + (message['content'] | trim) }}"
    "{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
_MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}"
    "{%- endif %}{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' }}{%- if system is defined and loop.last %}{{- system + '\\n\\n' }}{%- endif %}"
    "{{- message.content + '[/INST]' }}{%- elif message.tool_calls %}CALLS"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}{%- elif message.role == 'tool' %}"
    "{%- if message.tool_call_id | length != 9 %}{{- raise_exception('Tool call IDs have 9 letters') }}{%- endif %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + (message.content | string) + ', \"call_id\": \"' + message.tool_call_id + '\"}' }}"
    "{{- '[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
MISTRAL_3 = _MISTRAL.replace(
    "CALLS",
    "{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}{%- if call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs have 9 letters') }}{%- endif %}{%- set out = call.function | tojson %}"
    "{{- out[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}",
)
MISTRAL_11 = _MISTRAL.replace(
    "CALLS",
    "{{- message.content }}{%- for call in message.tool_calls %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}"
    "{{- call.function.arguments | tojson }}{%- endfor %}{{- eos_token }}",
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{%- if m['role'] == 'system' %}{{ m['content'] }}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{ '\n\n## Tools\n' }}{% for tool in tools %}{{ tool['function'] | tojson }}{% endfor %}{%- endif %}"
    "{%- set ns = namespace(outputs=false) %}{%- for m in messages %}{%- if m['role'] == 'user' %}"
    "{{ '<｜User｜>' + m['content'] }}{%- elif m['role'] == 'assistant' and m['tool_calls'] %}{{ '<｜Assistant｜>OPEN' }}"
    "{%- for call in m['tool_calls'] %}{%- set call = call['function'] %}{{- '<｜tool▁calls▁begin｜>' if loop.first else 'GAP' }}"
    "CALL{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- elif m['role'] == 'assistant' %}"
    "{%- set said = m['content'] %}{%- if '</think>' in said %}{%- set said = said.split('</think>')[-1] %}{%- endif %}"
    "{{ '<｜Assistant｜>OPEN' + said + '<｜end▁of▁sentence｜>' }}{%- elif m['role'] == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>THINK' }}{% endif %}"
)
DEEPSEEK_3 = (
    _DEEPSEEK.replace("OPEN", "")
    .replace("GAP", "\n")
    .replace("THINK", "")
    .replace(
        "CALL{",
        "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call['name'] + '\n```json\n' + call['arguments'] + "
        "'\n```<｜tool▁call▁end｜>' }}{",
    )
)
DEEPSEEK_31 = (
    _DEEPSEEK.replace("OPEN", "</think>")
    .replace("GAP", "")
    .replace("THINK", "' + ('<think>' if thinking else '</think>') + '")
    .replace(
        "CALL{",
        "{{- '<｜tool▁call▁begin｜>' + call['name'] + '<｜tool▁sep｜>' + call['arguments'] + '<｜tool▁call▁end｜>' }}{",
    )
)
GPT_OSS = (
    "{{- '<|start|>system<|message|>You are ChatGPT.\\n\\nReasoning: ' + (reasoning_effort or 'medium') }}"
    "{{- '\\n\\n# Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- if messages[0].role == 'system' %}{%- set told = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}"
    "{%- if told or tools %}{{- '<|start|>developer<|message|>' }}{%- if told %}{{- '# Instructions\\n\\n' + told + '\\n\\n' }}"
    "{%- endif %}{%- if tools %}{{- '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}{%- for tool in tools %}"
    "{{- '// ' + (tool.function.description or '') + '\\ntype ' + tool.function.name + ' = (_: ' }}"
    "{{- (tool.function.parameters or {}) | tojson + ') => any;\\n\\n' }}{%- endfor %}{{- '} // namespace functions' }}"
    "{%- endif %}{{- '<|end|>' }}{%- endif %}{%- set last = namespace(call=none) %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}"
    "{%- if message.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{%- set last.call = call.name %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson }}{{- '<|call|>' }}{%- elif message.role == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- elif message.role == 'tool' %}"
    "{{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' + (message.content | tojson) }}"
    "{{- '<|end|>' }}{%- else %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
FUNCTION_GEMMA = (
    "{%- macro value(v) -%}{%- if v is string -%}{{ '<escape>' + v + '<escape>' }}{%- elif v is boolean -%}"
    "{{ 'true' if v else 'false' }}{%- elif v is mapping -%}{{ '{' }}{%- for k, inner in v | items -%}"
    "{{ k + ':' + value(inner) }}{{ ',' if not loop.last else '' }}{%- endfor -%}{{ '}' }}{%- elif v is iterable -%}"
    "{{ '[' }}{%- for inner in v -%}{{ value(inner) }}{{ ',' if not loop.last else '' }}{%- endfor -%}{{ ']' }}"
    "{%- elif v is none -%}null{%- else -%}{{ v | string }}{%- endif -%}{%- endmacro -%}"
    "{{ bos_token }}{%- if tools or messages[0].role == 'system' -%}{{ '<start_of_turn>developer\n' }}"
    "{%- if messages[0].role == 'system' -%}{{ messages[0].content | trim }}{%- endif -%}{%- for tool in tools or [] -%}"
    "{{ '<start_function_declaration>declaration:' + tool.function.name + '{description:' }}"
    "{{ value(tool.function.description or '') + '}<end_function_declaration>' }}{%- endfor -%}{{ '<end_of_turn>\n' }}{%- endif -%}"
    "{%- for message in messages -%}{%- if message.role == 'user' -%}{{ '<start_of_turn>user\n' + message.content | trim }}"
    "{{ '<end_of_turn>\n' }}{%- elif message.role == 'assistant' -%}{{ '<start_of_turn>model\n' }}"
    "{{ message.content | trim }}{%- for call in message.tool_calls or [] -%}"
    "{{ '<start_function_call>call:' + call.function.name + value(call.function.arguments) + '<end_function_call>' }}"
    "{%- endfor -%}{{ '<start_function_response>' if message.tool_calls else '<end_of_turn>\n' }}{%- elif message.role == 'tool' -%}"
    "{{ 'response:' + message.name + '{value:' + value(message.content) + '}<end_function_response>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)


@dataclass(frozen=True)
class Published:
    """A template, or several by name, and what its models write."""

    source: str | dict[str, str]
    # Writes calls as the model does, where the template writes none, or one alone.
    writer: Callable[[Calls], str] | None = None
    thought: str = "<think>\n{}\n</think>\n\n"
    # The same where it thinks nothing.
    empty: str = "<think>\n\n</think>\n\n"
    # What a plain answer begins with.
    begins: str = ""
    special: tuple[str, ...] = ()
    # The template takes arguments as JSON.
    as_text: bool = False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        made = tiny.tokenizer()
        made.add_special_tokens({"additional_special_tokens": [*self.special]})
        made.chat_template = self.source
        return made

    def calls(self, calls: Calls) -> str:
        if self.writer is not None:
            return self.writer(calls)
        given = [(name, _json(each) if self.as_text else each) for name, each in calls]
        functions = [{"name": name, "arguments": each} for name, each in given]
        made = [{"id": "abcdefghi", "type": "function", "function": each} for each in functions]
        tokenizer, source = self.tokenizer, self.source["tool_use"] if isinstance(self.source, dict) else self.source
        written, plain = (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "Hi"}, {"role": "assistant", **answer}],
                tools=[],
                chat_template=source,
                tokenize=False,
            )
            for answer in ({"content": "", "tool_calls": made}, {"content": "~"})
        )
        begin, _, end = plain.partition("~")
        written = written.removeprefix(begin.rstrip(" ")).removesuffix(end)
        return str(written.removesuffix("<start_function_response>").strip())


def _object(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {_json(arguments)}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _oss(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
        for name, given in calls
    )


_DEEPSEEK_MARKS = tuple(f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))

PUBLISHED = {
    "qwen3": Published(QWEN_3),
    "hermes-2-pro": Published({"default": HERMES_DEFAULT, "tool_use": HERMES}),
    "qwen3-coder": Published(QWEN_CODER),
    # The prompt has opened its thoughts.
    "nemotron-3": Published(NEMOTRON_3, thought="{}\n</think>\n", empty="</think>\n"),
    "llama-3.1": Published(LLAMA_3, lambda calls: "; ".join(_object(*call, "parameters") for call in calls)),
    "mistral-3": Published(MISTRAL_3, special=("[TOOL_CALLS]",)),
    "mistral-11": Published(MISTRAL_11, special=("[TOOL_CALLS]", "[ARGS]")),
    "deepseek-3": Published(DEEPSEEK_3, special=_DEEPSEEK_MARKS, as_text=True),
    "deepseek-3.1": Published(
        DEEPSEEK_31, thought="{}</think>", empty="</think>", special=_DEEPSEEK_MARKS, as_text=True
    ),
    "gpt-oss": Published(
        GPT_OSS,
        _oss,
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        "<|channel|>analysis<|message|><|end|><|start|>assistant",
        "<|channel|>final<|message|>",
        ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
    ),
    "functiongemma": Published(FUNCTION_GEMMA),
}

READS_PARTS = {
    "idefics3": (
        "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
        "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    # What a user says as parts, what others say as text.
    "mixed": (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
        "{{ '[/INST]' }}{% else %}{{ message['content'] + '</s>' }}{% endif %}{% endfor %}"
    ),
}
"""Shapes that read what is said as a list of parts, and nothing out of a text."""

ANSWERS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<end>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A shape of nobody: CALL writes one."""
TAGGED = ANSWERS.replace(
    "CALL",
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
