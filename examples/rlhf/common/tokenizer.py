"""A byte-level tokenizer in Hugging Face format: token i is byte i, so every text comes back as it was; no download.

make_byte_tokenizer().save_pretrained("runs/model")
tokenizer = AutoTokenizer.from_pretrained("runs/model")
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (PAD, END, *ROLE_TOKENS.values())  # tokens 256, 257, ...

# A turn is its role's token and its text; the assistant's is ended by the end-of-text token, which it has to learn to
# write. The generation markers tell which tokens are the assistant's own.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
<|assistant|>{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
{%- elif message['role'] == 'user' -%}
<|user|>{{ message['content'] }}
{%- elif message['role'] == 'system' -%}
<|system|>{{ message['content'] }}
{%- else -%}
{{ raise_exception('this chat template has no role ' ~ message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 has it.

    Printable bytes of Latin-1 stand for themselves, the other 68 are the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, others = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + others))
            others += 1
    return characters


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, then SPECIAL_TOKENS: pad, end of text (also the end of an assistant's turn), and a token a role.

    No merges, no normalizer, no space put before a text, none taken away by decode(). Nothing is added to a text: no
    begin-of-text token exists, and the end-of-text token is the caller's to add.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLE_TOKENS.values()),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
