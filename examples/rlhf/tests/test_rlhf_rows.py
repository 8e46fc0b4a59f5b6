"""Reading rows for the RLHF examples: kinds and columns, files and data sets, and every way a row can be bad."""

import json

import pytest
from common.rows import BadRow, RowError, Rows, checked_row, conversational, read_rows
from hypothesis import given, settings
from hypothesis import strategies as st

datasets = pytest.importorskip("datasets", reason="the extra `examples` installs datasets")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write_lines(path, rows):
    """JSON lines; a row that is bytes is written as it is."""
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return str(path)


def write_parquet(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


# --- kinds of rows -------------------------------------------------------------------------------------------------

TURNS = [user("2+2?"), assistant("4")]
GOOD = {
    "text": [({"text": "a b", "id": 1}, {"text": "a b"})],
    "sft": [
        ({"messages": TURNS, "id": 1}, {"messages": TURNS}),
        ({"messages": [{"role": "system", "content": ""}, *TURNS]},) * 2,
        ({"prompt": "2+2=", "completion": "4", "id": 1}, {"prompt": "2+2=", "completion": "4"}),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]},) * 2,
        ({"prompt": " a ", "completion": " b\n"},) * 2,  # texts are not trimmed
        ({"prompt": "p", "completion": "c", "messages": None}, {"prompt": "p", "completion": "c"}),
        ({"prompt": "p", "response": "r", "chosen": "c", "rejected": "x"}, {"prompt": "p", "completion": "r"}),
        ({"prompt": "p", "chosen": "c", "rejected": "x"}, {"prompt": "p", "completion": "c"}),
        ({"chosen": TURNS, "rejected": [TURNS[0], assistant("5")]}, {"messages": TURNS}),
        ({"question": "q", "answer": "2 and 2\n#### 4"}, {"prompt": "q", "completion": "2 and 2\n#### 4"}),
    ],
    "preference": [
        ({"prompt": "p", "chosen": "c", "rejected": "r", "id": 1}, {"prompt": "p", "chosen": "c", "rejected": "r"}),
        ({"prompt": "p", "chosen": "c", "rejected": "r", "margin": 2},) * 2,
        ({"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [assistant("5")]},) * 2,
        (  # the prompt in both, as turns
            {"chosen": TURNS, "rejected": [TURNS[0], assistant("5")]},
            {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [assistant("5")]},
        ),
        (  # and again as a text, as in UltraFeedback
            {"prompt": "2+2?", "chosen": TURNS, "rejected": [TURNS[0], assistant("5")]},
            {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [assistant("5")]},
        ),
        (  # the prompt in both, as text: up to the space before the first word that differs
            {"chosen": "The sky is blue.", "rejected": "The sky is black."},
            {"prompt": "The sky is", "chosen": " blue.", "rejected": " black."},
        ),
        (
            {"chosen": "The sky is", "rejected": "The sky is black."},
            {"prompt": "The sky", "chosen": " is", "rejected": " is black."},
        ),
        ({"chosen": "a b c", "rejected": "a bc"}, {"prompt": "a", "chosen": " b c", "rejected": " bc"}),
        (  # Anthropic/hh-rlhf
            {"chosen": "\n\nHuman: Hi\n\nAssistant: I do.", "rejected": "\n\nHuman: Hi\n\nAssistant: I don't."},
            {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": " I do.", "rejected": " I don't."},
        ),
    ],
    "prompt": [
        ({"prompt": "2+2=", "answer": "4", "kind": "add"},) * 2,
        ({"prompt": TURNS[:1], "answer": 4},) * 2,
        ({"question": "q", "answer": "2 and 2\n#### 1,004"}, {"prompt": "q", "answer": "1004"}),
        ({"question": "q", "answer": " four "}, {"prompt": "q", "answer": "four"}),
        ({"question": "q", "answer": 4}, {"prompt": "q", "answer": 4}),
        ({"messages": [*TURNS, user("3+3?"), assistant("6")], "id": 7}, {"prompt": [*TURNS, user("3+3?")], "id": 7}),
        ({"messages": [user("a"), user("b"), assistant("c"), assistant("d")]}, {"prompt": [user("a"), user("b")]}),
        ({"prompt": "2+2?", "chosen": TURNS, "rejected": [TURNS[0], assistant("5")]}, {"prompt": TURNS[:1]}),
        ({"chosen": "a b", "rejected": "a c"}, {"prompt": "a"}),
        ({"prompt": "p", "response": "r", "chosen": "c", "rejected": "x"},) * 2,
        ({"prompt": "p", "chosen": [assistant("c")]},) * 2,
    ],
}


@pytest.mark.parametrize("kind", GOOD)
def test_columns_of_each_kind(kind):
    for record, row in GOOD[kind]:
        assert checked_row(record, kind) == row, record


@pytest.mark.parametrize("kind", GOOD)
def test_the_same_from_json_lines_json_parquet_and_data_sets(kind, tmp_path, monkeypatch):
    """A parquet file has all columns in all rows; rows of different types go to different files."""
    for number, (record, row) in enumerate(GOOD[kind]):
        array = tmp_path / f"array{number}.json"
        array.write_text("\n" + json.dumps([record, record]))
        files = [
            write_lines(tmp_path / f"{number}.jsonl", [record, b"", record]),
            write_lines(tmp_path / f"lines{number}.json", [record, record]),
            str(array),
            write_parquet(tmp_path / f"{number}.parquet", [record, record]),
        ]
        for file in files:
            read = read_rows([file], kind, "refuse")
            assert (read.rows, read.bad, read.kind) == ([row, row], [], kind), file
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *_, record=record, **__: datasets.Dataset.from_list([record])
        )
        assert read_rows(["some/name"], kind, "refuse").rows == [row]


def test_known_data_sets_by_their_columns(tmp_path):
    """Rows with the columns of the data sets on the hub, as published, read by all the kinds they serve for."""
    static = write_parquet(
        tmp_path / "static.parquet",
        [
            {
                "prompt": "\n\nHuman: Can you?\n\nAssistant:",
                "response": " Yes.",
                "chosen": " Yes.",
                "rejected": " No.",
            }
        ],
    )
    prompt = "\n\nHuman: Can you?\n\nAssistant:"
    assert read_rows([static], "sft").rows == [{"prompt": prompt, "completion": " Yes."}]
    assert read_rows([static], "preference").rows == [{"prompt": prompt, "chosen": " Yes.", "rejected": " No."}]
    assert read_rows([static], "prompt").rows[0]["prompt"] == prompt

    chosen, rejected = [user("Why?"), assistant("So.")], [user("Why?"), assistant("No.")]
    feedback = {
        "prompt": "Why?",
        "prompt_id": "6a",
        "chosen": chosen,
        "rejected": rejected,
        "messages": chosen,
        "score_chosen": 8.0,
        "score_rejected": 5.5,
    }
    tie = {**feedback, "rejected": chosen}
    ultra = write_parquet(tmp_path / "ultra.parquet", [feedback, tie])
    assert read_rows([ultra], "sft").rows == 2 * [{"messages": chosen}]
    preferences = read_rows([ultra], "preference")
    assert preferences.rows == [{"prompt": chosen[:1], "chosen": chosen[1:], "rejected": rejected[1:]}]
    assert [(bad.line, bad.why) for bad in preferences.bad] == [(2, "chosen and rejected are the same")]
    row = read_rows([ultra], "prompt").rows[0]
    assert (row["prompt"], row["score_chosen"]) == (chosen[:1], 8.0)

    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"
    gsm8k = write_parquet(tmp_path / "gsm8k.parquet", [{"question": "How many?", "answer": solution}])
    assert read_rows([gsm8k], "prompt", columns=["answer"]).rows == [{"prompt": "How many?", "answer": "1072"}]
    assert read_rows([gsm8k], "sft").rows == [{"prompt": "How many?", "completion": solution}]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ([user("u"), assistant("a")], [user("u"), assistant("b")]),
        ([*TURNS, user("u"), assistant("a")], [*TURNS, user("u"), assistant("b"), user("v"), assistant("w")]),
        ("The sky is blue.", "The sky is green."),
        ("a b", "a c"),
    ],
)
def test_implicit_prompts_are_those_of_trl(chosen, rejected):
    trl = pytest.importorskip("trl.data_utils", reason="the extra `rlhf` installs trl")
    row = {"chosen": chosen, "rejected": rejected}
    assert checked_row(row, "preference") == trl.extract_prompt(row)


def test_texts_as_turns(tmp_path):
    turns = {
        "sft": ({"prompt": "p", "completion": "c"}, {"prompt": [user("p")], "completion": [assistant("c")]}),
        "preference": (
            {"prompt": "p", "chosen": "c", "rejected": "r"},
            {"prompt": [user("p")], "chosen": [assistant("c")], "rejected": [assistant("r")]},
        ),
        "prompt": (
            {"prompt": "p", "answer": "a", "chosen": "c"},
            {"prompt": [user("p")], "answer": "a", "chosen": "c"},
        ),
        "text": ({"text": "t"}, {"text": "t"}),
    }
    for kind, (row, expected) in turns.items():
        assert conversational(row, kind) == expected == conversational(expected, kind)
        file = write_lines(tmp_path / f"{kind}.jsonl", [row])
        assert read_rows([file], kind, chat=True).rows == [expected]
        assert read_rows([file], kind).rows == [row]


# --- bad rows ------------------------------------------------------------------------------------------------------

PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}
BAD = [
    ("sft", b'{"prompt": "p", "completion": ', "not JSON: Expecting value"),
    ("sft", b"{'prompt': 'p'}", "not JSON: Expecting property name"),
    ("sft", b'{"prompt": "p"} {}', "not JSON: Extra data"),
    ("sft", b"[" * 100_000, "not JSON"),
    ("sft", b'{"prompt": "caf\xe9", "completion": "c"}', "not UTF-8 at byte 16 of the line"),
    ("sft", {"prompt": "a \ud800", "completion": "c"}, "half a surrogate pair at character 3"),
    ("prompt", {"prompt": "p", "notes": [{"x": "\udc00"}]}, "half a surrogate pair at character 1"),
    ("sft", ["prompt", "completion"], "a row is an object with named columns, this is a list"),
    ("sft", "p", "this is a text"),
    ("sft", 3, "this is a number"),
    ("sft", b"null", "this is null"),
    ("text", {"body": "t"}, r"no column 'text' \(there are body\)"),
    ("text", {}, r"no column 'text' \(there are none\)"),
    ("text", {"text": " \n"}, "text is empty"),
    ("text", {"text": ["a"]}, "turn 1 of text is a text"),
    ("text", {"text": TURNS}, "text is a list, not a text"),
    ("sft", {"prompt": "p"}, r"no column 'completion' \(there are prompt\)"),
    ("sft", {"completion": "c"}, "no column 'prompt'"),
    ("sft", {"prompt": None, "completion": "c"}, "no column 'prompt'"),
    ("sft", {"question": "q"}, "no column 'completion'"),
    ("sft", {"question": "q", "answer": 4}, "answer is a number, neither a text nor a list"),
    ("sft", {"prompt": "", "completion": "c"}, "prompt is empty"),
    ("sft", {"prompt": [], "completion": [assistant("a")]}, "prompt is empty"),
    ("sft", {"prompt": "p", "completion": ""}, "completion is empty"),
    ("sft", {"prompt": "p", "completion": " \n"}, "completion is empty"),
    ("sft", {"prompt": 5, "completion": "c"}, "prompt is a number, neither a text nor a list"),
    ("sft", {"prompt": "p", "completion": True}, "completion is true or false"),
    ("sft", {"prompt": "p", "completion": {"content": "c"}}, "completion is an object"),
    ("sft", {"prompt": "p", "completion": [assistant("a")]}, "prompt is a text, completion is a list"),
    ("sft", {"prompt": [user("u")], "completion": "c"}, "prompt is a list, completion is a text"),
    ("sft", {"prompt": TURNS, "completion": [assistant("a")]}, "prompt ends with a turn of the assistant"),
    (
        "sft",
        {"prompt": TURNS[:1], "completion": [assistant("a"), user("u")]},
        "completion ends with a turn of role user",
    ),
    ("sft", {"messages": []}, "messages is empty"),
    ("sft", {"messages": "hello"}, "messages is a text, not a list"),
    ("sft", {"messages": ["hello"]}, "turn 1 of messages is a text"),
    ("sft", {"messages": [user("u")]}, "messages has no turn of the assistant"),
    (
        "sft",
        {"messages": [user("u"), {"role": "bot", "content": "b"}]},
        "turn 2 of messages has the role 'bot'; the roles",
    ),
    ("sft", {"messages": [user("u"), {"content": "b"}]}, "turn 2 of messages has the role None"),
    ("sft", {"messages": [user("u"), {"role": ["user"], "content": "b"}]}, "has the role \\['user'\\]"),
    ("sft", {"messages": [user("u"), {"role": "assistant"}]}, "turn 2 of messages has null as its content"),
    ("sft", {"messages": [user("u"), assistant([{"type": "text"}])]}, "turn 2 of messages has a list as its content"),
    ("sft", {"messages": [user("u"), assistant(" ")]}, "turn 2 of messages is empty"),
    ("preference", {"prompt": "p", "chosen": "c"}, "no column 'rejected'"),
    ("preference", {"prompt": "p", "rejected": "c"}, "no column 'chosen'"),
    ("preference", {**PAIR, "prompt": ""}, "prompt is empty"),
    ("preference", {**PAIR, "chosen": ""}, "chosen is empty"),
    ("preference", {**PAIR, "rejected": "\n"}, "rejected is empty"),
    ("preference", {**PAIR, "rejected": "c"}, "chosen and rejected are the same"),
    ("preference", {**PAIR, "rejected": 3}, "rejected is a number"),
    ("preference", {**PAIR, "chosen": [assistant("a")]}, "chosen is a list, rejected is a text"),
    ("preference", {**PAIR, "prompt": [user("u")]}, "prompt is a list, chosen is a text"),
    ("preference", {**PAIR, "chosen": [assistant("a")], "rejected": [assistant("b")]}, "prompt is a text, chosen is a"),
    ("preference", {**PAIR, "margin": "big"}, "margin is 'big', not a finite number"),
    ("preference", b'{"prompt": "p", "chosen": "c", "rejected": "r", "margin": NaN}', "margin is nan"),
    ("preference", {"chosen": TURNS, "rejected": TURNS}, "chosen and rejected are the same"),
    ("preference", {"chosen": TURNS, "rejected": [user("x"), assistant("y")]}, "do not begin in the same way"),
    ("preference", {"chosen": TURNS, "rejected": TURNS[:1]}, "rejected is empty"),
    (
        "preference",
        {"chosen": [*TURNS, user("a"), assistant("b")], "rejected": [*TURNS, user("c"), assistant("d")]},
        "chosen begins with a turn of role user",
    ),
    (
        "preference",
        {"chosen": "abc", "rejected": "abd"},
        "no prompt, and chosen and rejected do not begin in the same way",
    ),
    (
        "preference",
        {"chosen": "\n\nHuman: Hi\n\nAssistant:", "rejected": "\n\nHuman: Hi\n\nAssistant: I"},
        "chosen is empty",
    ),
    ("prompt", {"answer": "4"}, "no column 'prompt'"),
    ("prompt", {"prompt": "  "}, "prompt is empty"),
    ("prompt", {"prompt": 4, "answer": "4"}, "prompt is a number"),
    ("prompt", {"prompt": TURNS}, "prompt ends with a turn of the assistant"),
    ("prompt", {"messages": [assistant("a")]}, "messages has no turn before the assistant's"),
    ("prompt", {"question": 3, "answer": "4"}, "question is a number"),
    ("prompt", {"prompt": "p", "completions": "c"}, "a column cannot be called 'completions'"),
]


@pytest.mark.parametrize(("kind", "row", "why"), BAD, ids=[f"{i}-{why[:30]}" for i, (_, _, why) in enumerate(BAD)])
def test_every_kind_of_bad_row(kind, row, why, tmp_path):
    good = GOOD[kind][0]
    file = write_lines(tmp_path / "rows.jsonl", [good[0], row, good[0]])
    read = read_rows([file], kind)
    assert read.rows == [good[1]] * 2
    (bad,) = read.bad
    assert (bad.source, bad.line) == (file, 2)
    assert len(str(bad)) < 600 and len(str(bad).splitlines()) == 1
    with pytest.raises(RowError, match=why):
        raise RowError(bad.why)
    assert f"2 {kind} rows, 1 bad rows left out\n  {file}:2: " in read.summary()
    with pytest.raises(ValueError, match=f"(?s)1 bad rows of 3:.*rows.jsonl:2: .*{why}"):
        read_rows([file], kind, bad_rows="refuse")


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": " "}])
def test_missing_answers_of_verifiable_tasks(answer, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": "4"}, {"prompt": "p", **answer}])
    read = read_rows([file], "prompt", columns=["answer"])
    assert len(read.rows) == 1 and read.bad[0].why == "no 'answer', which the reward function needs"
    assert len(read_rows([file], "prompt").rows) == 2  # where nothing needs it
    zero = write_lines(tmp_path / "zero.jsonl", [{"prompt": "p", "answer": 0}])
    assert read_rows([zero], "prompt", "refuse", columns=["answer"]).rows[0]["answer"] == 0


def test_bad_rows_of_parquet_and_data_sets_are_counted_too(tmp_path, monkeypatch):
    rows = [{"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": None}, {"prompt": "", "completion": "c"}]
    data_set = datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data_set)
    for source in (write_parquet(tmp_path / "rows.parquet", rows), "some/name"):
        read = read_rows([source], "sft")
        assert len(read.rows) == 1 and [(bad.source, bad.line) for bad in read.bad] == [(source, 2), (source, 3)]
        assert str(read.bad[1]) == f"{source}:3: prompt is empty: {{'completion': 'c', 'prompt': ''}}"


def test_parquet_rows_that_are_not_utf8(tmp_path):
    """Arrow does not look into its strings."""
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")
    strings = pyarrow.array([b"a", b"caf\xe9", b"b"], pyarrow.binary()).view(pyarrow.string())
    pyarrow_parquet.write_table(pyarrow.table({"text": strings}), tmp_path / "rows.parquet")
    read = read_rows([str(tmp_path / "rows.parquet")], "text")
    assert texts(read) == ["a", "b"] and read.bad[0].line == 2
    assert read.bad[0].why == "not UTF-8: unexpected end of data at byte 4 of a text"


def test_the_first_five_bad_rows_are_shown_and_all_are_counted(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [{"text": "t"}] + [{"text": ""}] * 7)
    with pytest.raises(ValueError) as raised:
        read_rows([file], "text", "refuse")
    lines = str(raised.value).splitlines()
    assert lines[0] == "7 bad rows of 8:" and lines[-1] == "  and 2 more" and len(lines) == 7
    assert lines[1].startswith(f"  {file}:2: text is empty")
    read = read_rows([file], "text")
    assert read.summary().splitlines()[1:] == lines[1:] and len(read.bad) == 7
    assert Rows("text", [{"text": "t"}]).summary() == "1 text rows"
    assert str(BadRow("a", 3, "why")) == "a:3: why"


def test_long_rows_are_shown_cut_short(tmp_path):
    huge = {"prompt": "x" * 10**6, "completion": 3, **{f"column{i}": i for i in range(1000)}}
    deep = b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}"
    file = write_lines(tmp_path / "rows.jsonl", [{"prompt": "p", "completion": "c"}, huge, b"x" * 10**6, deep])
    read = read_rows([file], "sft")
    assert [bad.line for bad in read.bad] == [2, 3, 4] and len(read.summary()) < 2500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
turn_like = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]) | json_values,
                  "content": st.text(max_size=4) | json_values}
)  # fmt: skip
column_names = ("text", "messages", "prompt", "completion", "chosen", "rejected", "question", "answer", "response")
row_like = st.dictionaries(
    st.sampled_from(column_names), st.lists(turn_like, max_size=3) | st.text(max_size=6) | json_values, max_size=5
)


@settings(derandomize=True, max_examples=200)
@given(row_like | json_values, st.sampled_from(sorted(GOOD)), st.booleans())
def test_any_object_is_a_good_row_or_a_row_error(record, kind, chat):
    try:
        row = checked_row(record, kind)
    except RowError as error:
        assert str(error)
        return
    row = conversational(row, kind) if chat else row
    for name in {"text": ["text"], "prompt": ["prompt"]}.get(kind, [key for key in row if key != "margin"]):
        value = row[name]
        if isinstance(value, str):
            assert value.strip() and value.encode()
        else:
            assert value and all(
                set(turn) == {"role", "content"} and isinstance(turn["content"], str) for turn in value
            )
    if kind == "preference":
        assert row["chosen"] != row["rejected"] and type(row["prompt"]) is type(row["chosen"]) is type(row["rejected"])
    if kind == "sft" and "messages" in row:
        assert "assistant" in [turn["role"] for turn in row["messages"]]
    assert checked_row(row, kind) == row  # what was read is read again


@settings(derandomize=True, max_examples=50)
@given(st.lists(st.binary(max_size=30) | row_like.map(lambda row: json.dumps(row).encode()), min_size=1, max_size=6))
def test_any_bytes_are_counted_and_never_raise(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    good = b'{"prompt": "p", "completion": "c"}'
    path.write_bytes(b"\n".join([good, *lines, good]))
    read = read_rows([str(path)], "sft")
    written = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    assert len(read.rows) + len(read.bad) == len(written)


# --- sources -------------------------------------------------------------------------------------------------------


def texts(read):
    return [row["text"] for row in read.rows]


def test_sources_are_read_in_order(tmp_path):
    first = write_lines(tmp_path / "b.jsonl", [{"text": "1"}, {"text": "2"}])
    second = write_parquet(tmp_path / "a.parquet", [{"text": "3"}])
    assert texts(read_rows([first, second, first], "text")) == ["1", "2", "3", "1", "2"]


def test_lines_with_byte_order_mark_and_windows_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "\xc3\xa9\xe2\x80\xa8b"}'
    )  # and no line end at the end
    read = read_rows([str(path)], "text", "refuse")
    assert texts(read) == ["a", "\u00e9\u2028b"]


def test_folders(tmp_path):
    for name in ("b.jsonl", "sub/a.parquet", "a.json", "readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write = write_parquet if name.endswith("parquet") else write_lines
        write(tmp_path / name, [{"text": name}])
    assert texts(read_rows([str(tmp_path)], "text")) == ["a.json", "b.jsonl", "sub/a.parquet"]


def test_folders_with_splits(tmp_path):
    """A data set that was downloaded: held-out rows must not be trained on because they lie in the same folder."""
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "constrained"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    (tmp_path / "validation").mkdir()
    write_lines(tmp_path / "validation" / "0000.jsonl", [{"text": "validation"}])
    train = ["train-00000-of-00002", "train-00001-of-00002"]
    assert texts(read_rows([str(tmp_path)], "text")) == train
    assert texts(read_rows([str(tmp_path)], "text", split="test")) == ["test-00000-of-00001"]
    assert texts(read_rows([f"{tmp_path}@test"], "text")) == ["test-00000-of-00001"]
    assert texts(read_rows([f"{tmp_path}@validation"], "text")) == ["validation"]
    assert len(texts(read_rows([f"{tmp_path}@other"], "text"))) == 5


def test_names_of_data_sets(monkeypatch):
    """NAME[:CONFIGURATION][@SPLIT], as load_dataset gets them."""
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return datasets.Dataset.from_list([{"text": "t"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    sources = ["openai/gsm8k:main", "HuggingFaceH4/ultrafeedback_binarized@train_prefs", "a/b:c@d", "Dahoas/rm-static"]
    assert len(read_rows(sources, "text", split="test").rows) == 4
    assert asked == [
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/ultrafeedback_binarized", None, "train_prefs"),
        ("a/b", "c", "d"),
        ("Dahoas/rm-static", None, "test"),
    ]


def test_data_sets_through_the_real_loader(tmp_path, monkeypatch):
    """load_dataset on a folder of files, which is what it does with a name once the files are there."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    write_lines(
        folder / "train.jsonl", [{"prompt": "p", "chosen": TURNS, "rejected": [user("2+2?"), assistant("5")]}] * 2
    )
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, configuration, split: load(str(folder), configuration, split=split, cache_dir=str(tmp_path / "c")),
    )
    read = read_rows(["some/name"], "preference", chat=True)
    assert [bad.why for bad in read.bad] == [] and len(read.rows) == 2
    assert read.rows[0] == {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [assistant("5")]}
    with pytest.raises(ValueError, match=r"some/name@test: neither a file or folder here nor a data set .*test"):
        read_rows(["some/name@test"], "preference")


def test_errors_of_sources(tmp_path, monkeypatch):
    good = write_lines(tmp_path / "good.jsonl", [{"text": "t"}])
    for missing in (str(tmp_path / "none.jsonl"), "./none", "none.parquet", "~/no/such/folder"):
        with pytest.raises(FileNotFoundError, match=r"no such file or folder"):
            read_rows([good, missing], "text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no file there ends in .jsonl, .json, .parquet"):
        read_rows([str(tmp_path / "empty")], "text")
    (tmp_path / "rows.csv").write_text("text\na\n")
    with pytest.raises(ValueError, match=r"rows.csv: its name ends in none of"):
        read_rows([str(tmp_path / "rows.csv")], "text")
    (tmp_path / "rows.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"rows.parquet: not a parquet file that can be read"):
        read_rows([str(tmp_path / "rows.parquet")], "text")
    for content in (b'[{"text": "t"}', b'["caf\xe9"]'):
        (tmp_path / "rows.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"rows.json: not a JSON array"):
            read_rows([str(tmp_path / "rows.json")], "text")
    with pytest.raises(ValueError, match=r"a file has no splits"):
        read_rows([good + "@train"], "text")
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"none.jsonl: no good row of kind text"):
        read_rows([str(tmp_path / "none.jsonl")], "text")
    with pytest.raises(ValueError, match=r"(?s)no good row of kind sft.*:1: no column 'completion'"):
        read_rows([good], "sft")
    with pytest.raises(ValueError, match=r"rows of kind 'chat'; the kinds are text, sft, preference, prompt"):
        read_rows([good], "chat")
    with pytest.raises(ValueError, match=r"bad_rows='raise'"):
        read_rows([good], "text", bad_rows="raise")

    def unreachable(*_, **__):
        raise ConnectionError("no hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"some/name: neither a file or folder here nor a data set that can be loaded"):
        read_rows(["some/name"], "text")
