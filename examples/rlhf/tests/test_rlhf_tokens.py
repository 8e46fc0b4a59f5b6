"""Rows as tokens for the RLHF examples: the byte-level tokenizer, what is learned of a row, padding and masks."""

import pytest
import torch
from common.rows import RowError
from common.tokenizer import ROLE_TOKENS, SPECIAL_TOKENS, byte_characters, make_byte_tokenizer
from common.tokens import (
    TooLong,
    collate,
    collate_left,
    collate_pairs,
    encode_preference,
    encode_prompt,
    encode_rows,
    encode_sft,
    pack_text,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

PAD, END, SYSTEM, USER, ASSISTANT = range(256, 261)


def turn(role, content):
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def byte_tokenizer():
    return make_byte_tokenizer()


# --- the byte-level tokenizer ----------------------------------------------------------------------------------------

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
text_with_specials = st.lists(any_text | st.sampled_from(SPECIAL_TOKENS), max_size=6).map("".join)


@settings(derandomize=True, max_examples=300)
@given(any_text)
def test_tokens_are_the_bytes_and_come_back(text):
    tokenizer = make_byte_tokenizer_once()
    ids = tokenizer(text)["input_ids"]
    if not any(special in text for special in SPECIAL_TOKENS):
        assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@settings(derandomize=True, max_examples=200)
@given(text_with_specials)
def test_texts_with_special_tokens_come_back_too(text):
    tokenizer = make_byte_tokenizer_once()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    literal = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert literal == list(text.encode()) and tokenizer.decode(literal) == text


def make_byte_tokenizer_once(cache=[]):  # noqa: B006
    if not cache:
        cache.append(make_byte_tokenizer())
    return cache[0]


def test_awkward_texts_come_back(byte_tokenizer, tmp_path):
    byte_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    awkward = [
        "",
        " ",
        "  a  b ",
        " .",
        "do n't ?",
        "\r\n\t\0",
        "e\u0301 \u00e9",
        "\u2028\ufeff",
        "日本 🙂",
        "\x7f\x80\xad",
    ]
    for tokenizer in (byte_tokenizer, loaded):
        for text in awkward:
            ids = tokenizer(text)["input_ids"]
            assert ids == list(text.encode()) and tokenizer.decode(ids) == text
        assert tokenizer.decode(list("é".encode())[:1]) == "\ufffd"  # half a character


def test_saved_and_loaded_tokenizer_is_the_same(byte_tokenizer, tmp_path):
    byte_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == byte_tokenizer.get_vocab() and len(loaded) == 256 + len(SPECIAL_TOKENS)
    assert loaded.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [PAD, END, SYSTEM, USER, ASSISTANT]
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (PAD, END, None)
    assert loaded.chat_template == byte_tokenizer.chat_template
    assert loaded.decode([97, PAD, USER, 98, END], skip_special_tokens=True) == "ab"
    assert set(loaded.all_special_tokens) == set(SPECIAL_TOKENS)


def test_byte_characters_are_the_byte_level_alphabet():
    characters = byte_characters()
    assert set(characters) == set(pre_tokenizers.ByteLevel.alphabet()) and len(set(characters)) == 256
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in map(chr, range(1, 0x800)):
        assert split.pre_tokenize_str(text)[0][0] == "".join(characters[byte] for byte in text.encode())


def test_chat_template_and_its_assistant_mask(byte_tokenizer):
    turns = [
        turn("system", " s "),
        turn("user", "u\n"),
        turn("assistant", "é "),
        turn("user", "v"),
        turn("assistant", "w"),
    ]
    ids = [SYSTEM, *b" s ", USER, *b"u\n", ASSISTANT, *"é ".encode(), END, USER, *b"v", ASSISTANT, *b"w", END]
    rendered = byte_tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    assert rendered["input_ids"] == ids
    mask = [0] * 8 + [1] * 4 + [0] * 3 + [1] * 2
    assert rendered["assistant_masks"] == mask and len(mask) == len(ids)
    prompt = byte_tokenizer.apply_chat_template(turns[:4], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt == ids[:15]
    assert set(ROLE_TOKENS) == {"system", "user", "assistant"}


# --- other tokenizers, made here -------------------------------------------------------------------------------------

MERGES = [("a", "b"), ("c", "d"), ("Ġ", "cd"), ("b", "c")]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As of Qwen3 and other models that think: earlier answers of the assistant look different from the last one.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('the first turn must be of the user') }}{% endif %}" + CHATML
)
TRIMMING = CHATML.replace("message.content", "message.content | trim")
SILENT = CHATML.replace(
    "{{ message.content }}<|im_end|>\n", "{% if message.role == 'user' %}{{ message.content }}{% endif %}"
)


def gpt2_like(template=None, bos=False, eos_added=False, pad_is_eos=True):
    """A byte-level BPE tokenizer with a few merges; <s> and </s> are added to a text if asked for."""
    vocabulary = {character: index for index, character in enumerate(byte_characters())}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"])
    if bos or eos_added:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if eos_added else "")
        ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        pad_token="</s>" if pad_is_eos else "<pad>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def pieces(tokenizer, item):
    """(text that is given, text that is learned, ...) of an item, in turns."""
    runs, learned = [], False
    start = 0
    for position, mark in enumerate([False, *item["response_mask"]]):
        if mark != learned:
            runs.append(tokenizer.decode(item["input_ids"][start:position]))
            start, learned = position, mark
    return (*runs, tokenizer.decode(item["input_ids"][start:]))


def check_item(item):
    assert set(item) == {"input_ids", "response_mask"}
    assert len(item["response_mask"]) == len(item["input_ids"]) - 1
    assert all(type(token) is int for token in item["input_ids"]) and all(
        type(mark) is bool for mark in item["response_mask"]
    )


# --- supervised rows -------------------------------------------------------------------------------------------------


def test_sft_of_texts(byte_tokenizer):
    item = encode_sft({"prompt": "2+2=", "completion": "4"}, byte_tokenizer, 6)
    assert item == {"input_ids": [*b"2+2=4", END], "response_mask": [False] * 3 + [True] * 2}
    check_item(item)
    already = encode_sft({"prompt": "2+2=", "completion": "4<|end|>"}, byte_tokenizer, 6)
    assert already == item  # one end is enough


@pytest.mark.parametrize("options", [{}, {"bos": True}, {"bos": True, "eos_added": True}, {"eos_added": True}])
def test_sft_of_texts_begins_as_generation_does(options):
    tokenizer = gpt2_like(**options)
    row = {"prompt": "ab", "completion": " cd e"}
    item = encode_sft(row, tokenizer, 99)
    begin = ["<s>"] if options.get("bos") else []
    assert tokenizer.convert_ids_to_tokens(item["input_ids"]) == [*begin, "ab", "Ġcd", "Ġ", "e", "</s>"]
    assert item["response_mask"] == [False] * len(begin) + [True] * 4
    prompt = encode_prompt(row, tokenizer, 99)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(prompt) == [*begin, "ab"]


@pytest.mark.parametrize(
    ("prompt", "completion", "tokens", "learned"),
    [
        ("ab ", "cd", ["ab", "Ġ", "cd", "</s>"], 2),  # together they would be "ab", "Ġcd"
        ("a", "b", ["a", "b", "</s>"], 2),  # together "ab"
        ("ab", "c", ["ab", "c", "</s>"], 2),
        ("xé", "é", ["x", "Ã", "©", "Ã", "©", "</s>"], 3),
    ],
)
def test_a_token_that_would_span_the_border_is_split(prompt, completion, tokens, learned):
    tokenizer = gpt2_like()
    item = encode_sft({"prompt": prompt, "completion": completion}, tokenizer, 99)
    assert tokenizer.convert_ids_to_tokens(item["input_ids"]) == tokens
    assert sum(item["response_mask"]) == learned and pieces(tokenizer, item) == (prompt, completion + "</s>")


@settings(derandomize=True, max_examples=200)
@given(st.text("abcd é", min_size=1, max_size=8), st.text("abcd é", min_size=1, max_size=8), st.booleans())
def test_prompt_and_completion_are_split_where_they_were_joined(prompt, completion, bos):
    tokenizer = gpt2_like(bos=bos)
    item = encode_sft({"prompt": prompt, "completion": completion}, tokenizer, 99)
    check_item(item)
    assert pieces(tokenizer, item) == (("<s>" if bos else "") + prompt, completion + "</s>")
    before = encode_prompt({"prompt": prompt}, tokenizer, 99)["input_ids"]
    assert item["input_ids"][: len(before)] == before and not any(item["response_mask"][: len(before) - 1])


def test_texts_that_do_not_join():
    """A tokenizer that puts a space before every text cannot continue one."""
    tokenizer = gpt2_like()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    with pytest.raises(RowError, match=r"the tokens of prompt and completion do not join: move the space"):
        encode_sft({"prompt": "a ", "completion": "cd"}, tokenizer, 99)
    assert encode_sft({"prompt": "a", "completion": " cd"}, tokenizer, 99)["response_mask"] == [False, True, True]


CONVERSATION = [
    turn("system", "be brief"),
    turn("user", "hi"),
    turn("assistant", "ho é"),
    turn("user", "and"),
    turn("assistant", "so"),
]


def test_sft_of_turns_with_markers(byte_tokenizer):
    item = encode_sft({"messages": CONVERSATION}, byte_tokenizer, 99)
    check_item(item)
    assert pieces(byte_tokenizer, item) == (
        "<|system|>be brief<|user|>hi<|assistant|>",
        "ho é<|end|>",
        "<|user|>and<|assistant|>",
        "so<|end|>",
    )
    only_last = encode_sft({"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}, byte_tokenizer, 99)
    assert only_last["input_ids"] == item["input_ids"]
    assert pieces(byte_tokenizer, only_last) == (
        "<|system|>be brief<|user|>hi<|assistant|>ho é<|end|><|user|>and<|assistant|>",
        "so<|end|>",
    )


def test_sft_of_turns_without_markers():
    tokenizer = gpt2_like(CHATML)
    item = encode_sft({"messages": CONVERSATION}, tokenizer, 999)
    check_item(item)
    assert pieces(tokenizer, item) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "ho é<|im_end|>\n",
        "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n",
        "so<|im_end|>\n",
    )
    last = encode_sft({"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}, tokenizer, 999)
    assert last["input_ids"] == item["input_ids"] and pieces(tokenizer, last)[-1] == "so<|im_end|>\n"
    assert len(pieces(tokenizer, last)) == 2


def test_both_ways_to_tell_the_answers_agree(byte_tokenizer):
    """The same template with its markers and without."""
    template = byte_tokenizer.chat_template
    unmarked = make_byte_tokenizer()
    unmarked.chat_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert unmarked.chat_template != template
    rows = [
        {"messages": CONVERSATION},
        {"messages": CONVERSATION[1:]},
        {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:]},
        {"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]},
    ]
    for row in rows:
        assert encode_sft(row, byte_tokenizer, 99) == encode_sft(row, unmarked, 99)


def test_a_template_whose_conversations_do_not_begin_with_their_turns():
    tokenizer = gpt2_like(FORGETFUL)
    with pytest.raises(RowError, match=r"does not begin with its own first 3 turns.*put \{% generation %\}"):
        encode_sft({"messages": CONVERSATION}, tokenizer, 999)
    # The last turn alone can be told, and so can a conversation of one answer.
    item = encode_sft({"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}, tokenizer, 999)
    assert pieces(tokenizer, item)[1:] == ("<think>so<|im_end|>\n",)
    assert pieces(tokenizer, encode_sft({"messages": CONVERSATION[:3]}, tokenizer, 999))[1:] == (
        "<think>ho é<|im_end|>\n",
    )
    # With markers every turn can be told, but the prompt has still to be what generation begins with.
    marked = gpt2_like(FORGETFUL.replace("<think>", "<think>{% generation %}{% endgeneration %}"))
    marked.chat_template = "{{ messages | length }}" + CHATML.replace(
        "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    )
    with pytest.raises(RowError, match=r"does not begin with its own first 4 turns"):
        encode_sft({"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}, marked, 999)


def test_rows_that_the_template_refuses():
    tokenizer = gpt2_like(STRICT)
    with pytest.raises(RowError, match=r"the chat template refuses it: the first turn must be of the user"):
        encode_sft({"messages": CONVERSATION}, tokenizer, 999)
    with pytest.raises(RowError, match=r"the chat template refuses it: this chat template has no role tool"):
        encode_sft({"messages": [turn("tool", "x"), *CONVERSATION]}, make_byte_tokenizer(), 999)
    with pytest.raises(RowError, match=r"the conversation begins with the assistant's turn"):
        encode_sft({"messages": CONVERSATION[2:]}, gpt2_like(CHATML), 999)
    marked = encode_sft({"messages": CONVERSATION[2:]}, make_byte_tokenizer(), 999)  # where the markers tell
    assert pieces(make_byte_tokenizer(), marked)[1] == "ho é<|end|>"
    with pytest.raises(RowError, match=r"no token of the answer is left to learn"):
        encode_sft({"messages": CONVERSATION[1:3]}, gpt2_like(SILENT), 999)


def test_turns_without_a_chat_template():
    tokenizer = gpt2_like()
    rows = [{"messages": CONVERSATION}, {"prompt": CONVERSATION[:1], "completion": CONVERSATION[2:3]}]
    for row in rows:
        with pytest.raises(ValueError, match=r"the tokenizer has no chat template: set tokenizer.chat_template"):
            encode_rows(encode_sft, [row], tokenizer, 99)
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template"):
        encode_rows(encode_prompt, [{"prompt": CONVERSATION[:2]}], tokenizer, 99)


# --- preference rows and prompts -------------------------------------------------------------------------------------


def test_preferences(byte_tokenizer):
    pair = encode_preference({"prompt": "2+2=", "chosen": "4", "rejected": "15"}, byte_tokenizer, 7)
    assert pair == {
        "chosen": {"input_ids": [*b"2+2=4", END], "response_mask": [False] * 3 + [True] * 2},
        "rejected": {"input_ids": [*b"2+2=15", END], "response_mask": [False] * 3 + [True] * 3},
    }
    row = {
        "prompt": CONVERSATION[:4],
        "chosen": CONVERSATION[4:],
        "rejected": [turn("assistant", "no way")],
        "margin": 2.0,
    }
    for tokenizer, end in ((byte_tokenizer, "<|end|>"), (gpt2_like(CHATML), "<|im_end|>\n")):
        pair = encode_preference(row, tokenizer, 999)
        before, chosen = pieces(tokenizer, pair["chosen"])
        again, rejected = pieces(tokenizer, pair["rejected"])
        assert before == again and (chosen, rejected) == (f"so{end}", f"no way{end}") and pair["margin"] == 2.0
        prompt = encode_prompt({"prompt": row["prompt"]}, tokenizer, 999)["input_ids"]
        for name in ("chosen", "rejected"):
            check_item(pair[name])
            assert pair[name]["input_ids"][: len(prompt)] == prompt
            assert pair[name]["response_mask"].index(True) == len(prompt) - 1


def test_answers_of_several_turns(byte_tokenizer):
    row = {"prompt": CONVERSATION[:2], "chosen": CONVERSATION[2:], "rejected": [turn("assistant", "no")]}
    chosen = pieces(byte_tokenizer, encode_preference(row, byte_tokenizer, 99)["chosen"])
    assert chosen[1:] == ("ho é<|end|>", "<|user|>and<|assistant|>", "so<|end|>")


def test_answers_that_become_the_same_tokens():
    row = {"prompt": [turn("user", "a")], "chosen": [turn("assistant", "b")], "rejected": [turn("assistant", "b ")]}
    with pytest.raises(RowError, match=r"chosen and rejected have the same tokens"):
        encode_preference(row, gpt2_like(TRIMMING), 99)


def test_prompts(byte_tokenizer):
    assert encode_prompt({"prompt": "2+2=", "answer": "4"}, byte_tokenizer, 4) == {"input_ids": [*b"2+2="]}
    turns = {"prompt": [turn("user", "hi")]}
    assert encode_prompt(turns, byte_tokenizer, 4) == {"input_ids": [USER, *b"hi", ASSISTANT]}
    with pytest.raises(TooLong):
        encode_prompt(turns, byte_tokenizer, 3)
    assert encode_prompt(turns, byte_tokenizer, 3, truncate=True) == {"input_ids": [*b"hi", ASSISTANT]}
    assert encode_prompt(turns, byte_tokenizer, 9, truncate=True) == {"input_ids": [USER, *b"hi", ASSISTANT]}


# --- many rows -------------------------------------------------------------------------------------------------------


def test_long_rows_are_counted_and_bad_ones_shown(byte_tokenizer):
    rows = [{"prompt": "p" * n, "completion": "c"} for n in (1, 4, 5, 9)]
    rows.insert(1, {"messages": [turn("tool", "t"), turn("assistant", "a")]})
    encoded = encode_rows(encode_sft, rows, byte_tokenizer, 6)
    assert [len(item["input_ids"]) for item in encoded.items] == [3, 6]
    assert (encoded.kept, encoded.too_long) == ([0, 2], 2)
    assert encoded.summary() == (
        "2 rows encoded, 2 left out as too long, 1 as bad\n"
        "  row:2: the chat template refuses it: this chat template has no role tool"
    )
    with pytest.raises(ValueError, match=r"1 of 5 rows cannot be encoded:\n  row:2: the chat template refuses"):
        encode_rows(encode_sft, rows, byte_tokenizer, 6, bad_rows="refuse")
    with pytest.raises(
        ValueError, match=r"no row is left of 5: 4 have more than 2 tokens, 1 cannot be encoded\n  row:2"
    ):
        encode_rows(encode_sft, rows, byte_tokenizer, 2)
    prompts = encode_rows(encode_prompt, rows[2:], byte_tokenizer, 4, truncate=True)
    assert [len(item["input_ids"]) for item in prompts.items] == [4, 4, 4] and prompts.too_long == 0
    assert prompts.summary() == "3 rows encoded, 0 left out as too long"
    pair = {"prompt": "p", "chosen": "c", "rejected": "r" * 9}
    assert encode_rows(encode_preference, [pair, {**pair, "rejected": "r"}], byte_tokenizer, 9).too_long == 1


def test_texts_are_packed(byte_tokenizer):
    items = pack_text([{"text": "abc"}, {"text": "de"}, {"text": "fghij"}], byte_tokenizer, 4)
    assert [item["input_ids"] for item in items] == [[*b"abc", END], [*b"de", END, *b"f"], [*b"ghij"]]
    assert all(item["response_mask"] == [True] * 3 for item in items)
    assert len(pack_text([{"text": "abc"}], byte_tokenizer, 4)) == 1
    with pytest.raises(ValueError, match=r"4 tokens of text are not enough for one sequence of 5"):
        pack_text([{"text": "abc"}], byte_tokenizer, 5)


# --- batches ---------------------------------------------------------------------------------------------------------

item_of_length = st.integers(2, 9).flatmap(
    lambda length: st.fixed_dictionaries(
        {
            "input_ids": st.lists(st.integers(0, 5), min_size=length, max_size=length),
            "response_mask": st.lists(st.booleans(), min_size=length - 1, max_size=length - 1),
        }
    )
)


@settings(derandomize=True, max_examples=150)
@given(st.lists(item_of_length, min_size=1, max_size=5), st.integers(0, 5))
def test_batches_hold_the_items_and_nothing_else(items, pad_id):
    """`pad_id` is a token that items have as well: the masks must not come from a comparison with it."""
    batch = collate(items, pad_id)
    length = max(len(item["input_ids"]) for item in items)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()} == {
        "input_ids": (torch.int64, (len(items), length)),
        "attention_mask": (torch.int64, (len(items), length)),
        "response_mask": (torch.bool, (len(items), length - 1)),
    }
    left = collate_left(items, pad_id)
    assert set(left) == {"input_ids", "attention_mask"}
    for row, item in enumerate(items):
        ids, pads = item["input_ids"], length - len(item["input_ids"])
        assert batch["input_ids"][row].tolist() == ids + [pad_id] * pads
        assert batch["attention_mask"][row].tolist() == [1] * len(ids) + [0] * pads
        assert batch["response_mask"][row].tolist() == item["response_mask"] + [False] * pads
        assert left["input_ids"][row].tolist() == [pad_id] * pads + ids
        assert left["attention_mask"][row].tolist() == [0] * pads + [1] * len(ids)


def test_padding_with_the_end_token_keeps_the_end_token():
    """As with GPT-2, where one token is both: the model has to learn to end."""
    tokenizer = gpt2_like(pad_is_eos=True)
    end = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == end
    items = [encode_sft({"prompt": "x", "completion": text}, tokenizer, 9) for text in ("y", "yyy")]
    batch = collate(items, tokenizer.pad_token_id)
    assert batch["input_ids"][0].tolist()[2:] == [end, end, end]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["response_mask"].tolist() == [[True, True, False, False], [True] * 4]
    prompts = [{"input_ids": [end, 5]}, {"input_ids": [5, 6, 7]}]  # a prompt that begins with it
    assert collate_left(prompts, end)["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]


def test_pairs_in_one_batch(byte_tokenizer):
    rows = [{"prompt": "p", "chosen": "c" * n, "rejected": "r" * m} for n, m in ((1, 4), (2, 1))]
    pairs = [encode_preference(row, byte_tokenizer, 9) for row in rows]
    batch = collate_pairs(pairs, PAD)
    expected = collate([pairs[0]["chosen"], pairs[1]["chosen"], pairs[0]["rejected"], pairs[1]["rejected"]], PAD)
    assert set(batch) == set(expected) and all(torch.equal(batch[name], expected[name]) for name in batch)
    assert batch["attention_mask"].sum(1).tolist() == [3, 4, 6, 3]
    margins = collate_pairs([pairs[0], {**pairs[1], "margin": 1.5}], PAD)["margin"]
    assert margins.dtype == torch.float32 and margins.tolist() == [0.0, 1.5]
