"""Templates with several turns of an assistant, and what a person marks as learned in each.

The learned text of the conversation `SEVERAL` was written down by hand, turn by turn.
"""

from support.byte_tokenizers import FAMILIES

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
VICUNA = (
    "Be kind. {% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
    "{% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
ALPACA = (  # writes no stop at all
    "{% for m in messages %}### {{ 'Response' if m.role == 'assistant' else 'Instruction' }}:\n"
    "{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{{ '<|CHATBOT_TOKEN|>' if m.role == 'assistant' else '<|USER_TOKEN|>' }}"
    "{{ m.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
# Marks what an assistant says, and writes its thoughts in the last turn only.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_THOUGHTS = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHATML_KIND = {
    "specials": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "eos": "<|endoftext|>",
}
ENDED = {"specials": ["<s>", "</s>"], "eos": "</s>"}

KINDS = FAMILIES | {
    "llama 3": {
        "specials": [
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|end_of_text|>",
        ],
        "template": LLAMA_3,
        "eos": "<|end_of_text|>",
        "bos": "<|begin_of_text|>",
    },
    "vicuna": ENDED | {"template": VICUNA},
    "alpaca": ENDED | {"template": ALPACA},
    "zephyr": ENDED | {"template": ZEPHYR},
    "command r": {
        "specials": [
            *("<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            *("<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"),
        ],
        "template": COMMAND_R,
        "eos": "<EOS_TOKEN>",
        "bos": "<BOS_TOKEN>",
    },
    "marked": CHATML_KIND | {"template": MARKED},
    "drops thoughts": CHATML_KIND | {"template": DROPS_THOUGHTS},
}

# Answers "A one" and "A two" to a user, who asks again in between.
SEVERAL = {
    "qwen base": ("A one<|im_end|>", "A two<|im_end|>"),
    "gemma": ("A one<end_of_turn>", "A two<end_of_turn>"),
    "glm 4": ("\nA one<|user|>", "\nA two<|user|>"),
    "gpt-oss": ("<|channel|>final<|message|>A one", "<|channel|>final<|message|>A two<|return|>"),
    "phi 3": ("A one<|end|>", "A two<|end|>"),
    "deepseek": ("A one<|eos|>", "A two<|eos|>"),
    "llama 2 without an end": (" A one", " A two</s>"),
    "llama 3": ("A one<|eot_id|>", "A two<|eot_id|>"),
    "vicuna": (" A one</s>", " A two</s>"),
    "alpaca": ("A one", "A two\n\n</s>"),  # its end is that of a completion of one turn
    "zephyr": ("A one</s>", "A two</s>"),
    "command r": ("A one<|END_OF_TURN_TOKEN|>", "A two<|END_OF_TURN_TOKEN|>"),
    "marked": ("A one<|im_end|>", "A two<|im_end|>"),
    "drops thoughts": ("A one<|im_end|>", "A two<|im_end|>"),
}
# Looks something up, is told what was found, and answers "A two".
WITH_A_TOOL = {
    "qwen base": (
        '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "A two<|im_end|>",
    ),
    "glm 4": ('look\n{"a": 1}<|observation|>', "\nA two<|user|>"),
    "gpt-oss": (
        ' to=functions.look<|channel|>commentary<|message|>{"a": 1}<|call|>',
        "<|channel|>final<|message|>A two<|return|>",
    ),
    "deepseek": ('<|calls|>look\n{"a": 1}<|/calls|><|eos|>', "A two<|eos|>"),
}
