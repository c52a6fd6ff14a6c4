"""Tokenizers of bytes and special tokens, with templates in the style of well-known families."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    folder, specials, *, template, eos, bos=None, pad=None, adds_bos=False, added=()
):
    """Saves one; `added` are tokens that stand for themselves and are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: number for number, byte in enumerate(alphabet)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(text, special=True) for text in specials])
    bytes_only.add_tokens([AddedToken(text, special=False) for text in added])
    if adds_bos:
        bytes_only.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bytes_only.token_to_id(bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return str(folder)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% elif m.tool_calls %}<|assistant|>{{ m.tool_calls[0].function.name }}\n"
    "{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions to=assistant<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|output|>{{ m.content }}<|/output|>"
    "{% elif m.tool_calls %}<|Assistant|><|calls|>{{ m.tool_calls[0].function.name + '\n' "
    "+ m.tool_calls[0].function.arguments }}<|/calls|><|eos|>"
    "{% else %}<|Assistant|>{{ m.content }}<|eos|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{% endif %}{% endfor %}"
)
CHATML_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GLM_SPECIALS = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"]
GPT_OSS_SPECIALS = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"]

FAMILIES = {
    "qwen base": {
        "specials": CHATML_SPECIALS,
        "added": ["<tool_call>", "</tool_call>"],
        "template": CHATML,
        "eos": "<|endoftext|>",
    },
    "gemma": {
        "specials": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "template": GEMMA,
        "eos": "<eos>",
        "bos": "<bos>",
        "adds_bos": True,
    },
    "glm 4": {"specials": GLM_SPECIALS, "template": GLM, "eos": "<|endoftext|>"},
    "gpt-oss": {"specials": GPT_OSS_SPECIALS, "template": GPT_OSS, "eos": "<|return|>"},
    "phi 3": {
        "specials": ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        "template": PHI_3,
        "eos": "<|endoftext|>",
    },
    "deepseek": {
        "specials": ["<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<|calls|>", "<|/calls|>"],
        "added": ["<|output|>", "<|/output|>"],
        "template": DEEPSEEK,
        "eos": "<|eos|>",
        "bos": "<|bos|>",
    },
    "llama 2 without an end": {
        "specials": ["<s>", "</s>"],
        "template": LLAMA_2,
        "eos": "</s>",
        "bos": "<s>",
    },
}
