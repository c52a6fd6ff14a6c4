"""Templates that render calls of tools, in the manner of families that people train."""

from support.byte_tokenizers import CHATML_SPECIALS, byte_tokenizer

_TOOLS_AS_LINES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\n</tools><|im_end|>\n{% endif %}"
)
_CHATML = (
    _TOOLS_AS_LINES + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    "{% if call.function %}{% set call = call.function %}{% endif %}"
    '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": {ARGUMENTS}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Dumps them whatever they are.
QWEN_2_5 = _CHATML.replace("{ARGUMENTS}", "{{ call.arguments | tojson }}")
# Leaves text as it stands and dumps the rest.
QWEN_3 = _CHATML.replace(
    "{ARGUMENTS}",
    "{% if call.arguments is string %}{{ call.arguments }}"
    "{% else %}{{ call.arguments | tojson }}{% endif %}",
)
# The call as a whole, in a layout without `function`.
HERMES = _CHATML.replace(
    '{"name": "{{ call.name }}", "arguments": {ARGUMENTS}}',
    "{{ {'arguments': call.arguments, 'name': call.name} | tojson }}",
)
# Dumps a call as a whole, and asks for an id of nine characters.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} [/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}{% set out = call.function | tojson %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '[TOOL_CALLS] [{{ out[:-1] }}, "id": "{{ call.id }}"}]{% endfor %}<|im_end|>'
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
# Takes text alone.
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<output>{{ m.content }}</output>"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}"
    "{{ '<call>' + call.function.name + '\n' + call.function.arguments + '</call>' }}{% endfor %}"
    "<|im_end|>{% else %}<answer>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
# Writes what it is given, which for an object is Python's own form of it.
CARELESS = _CHATML.replace("{ARGUMENTS}", "{{ call.arguments }}")
WITHOUT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(folder, template):
    """A tokenizer of bytes and ChatML's special tokens with such a template."""
    return byte_tokenizer(folder, CHATML_SPECIALS, template=template, eos="<|endoftext|>")
