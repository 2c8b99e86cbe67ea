"""Chat templates for checkpoints that have none."""

from __future__ import annotations

from pathlib import Path

PLAIN = (
    "{% for message in messages %}"
    "{% if message.content == 'mute' %}{{ raise_exception('nothing is said') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}"
    "{% if tools %}tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Each message on a line, after its role; names of tools on another."""


BARE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ kind }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The same for one that reads no tools, and what a request says of `kind`."""


QWEN_CODER = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""One that writes arguments of calls between tags."""


def written(folder: Path, source: str = PLAIN) -> str:
    """The path of a file with a template."""
    file = folder / "template.jinja"
    file.write_text(source, encoding="utf-8")
    return str(file)
