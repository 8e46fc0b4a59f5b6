"""The offline data of the RLHF examples (tasks, pairs, files, models) and the order in which rows are seen."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import make_data
import pytest
import torch
from common import tasks
from common.order import Order
from common.rows import read_rows
from common.tasks import KINDS, Difficulty, Task, make_tasks, preference_rows, prompt_rows, sft_rows, wrong_answers
from common.tokenizer import make_byte_tokenizer
from hang_guard import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

RLHF = Path(make_data.__file__).parent

# --- tasks ---------------------------------------------------------------------------------------------------------


def solve(prompt):
    """The answer worked out from the prompt's text alone, in another way than tasks.py does it."""
    if match := re.fullmatch(r"(\d+)([+-])(\d+)=", prompt):
        first, sign, second = match.groups()
        return str(int(first) + int(sign + second))
    kind, *operands = prompt.removesuffix("=").split(" ")
    last = operands[-1]
    letters = list(last)
    if kind in ("max", "min"):
        low, high = sorted(operands, key=lambda number: (len(number), number))
        return high if kind == "max" else low
    if kind == "count":
        return str(Counter(last)[operands[0]])
    if kind == "delete":
        return "".join(letter for letter in letters if letter != operands[0])
    if kind == "sort":
        return "".join(letter * last.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz")
    if kind == "reverse":
        return "".join(reversed(letters))
    if kind == "upper":
        return "".join(chr(ord(letter) - 32) for letter in letters)
    simple = {"length": str(sum(1 for _ in letters)), "copy": last, "repeat": 2 * last}
    return simple[kind] if kind in simple else {"first": letters[:1], "last": letters[-1:]}[kind][0]


@pytest.fixture(scope="module")
def split():
    return make_tasks(3000, 1000, seed=5)


def test_answers_are_right(split):
    for task in split[0] + split[1]:
        assert solve(task.prompt) == task.answer, task


def test_known_answers():
    known = {
        Task("add", (17, 5)): ("17+5=", "22"),
        Task("subtract", (17, 5)): ("17-5=", "12"),
        Task("max", (9, 12)): ("max 9 12=", "12"),
        Task("min", (9, 12)): ("min 9 12=", "9"),
        Task("count", ("b", "abba")): ("count b abba=", "2"),
        Task("length", ("abba",)): ("length abba=", "4"),
        Task("copy", ("bad",)): ("copy bad=", "bad"),
        Task("reverse", ("bad",)): ("reverse bad=", "dab"),
        Task("upper", ("bad",)): ("upper bad=", "BAD"),
        Task("first", ("bad",)): ("first bad=", "b"),
        Task("last", ("bad",)): ("last bad=", "d"),
        Task("sort", ("bad",)): ("sort bad=", "abd"),
        Task("repeat", ("bad",)): ("repeat bad=", "badbad"),
        Task("delete", ("b", "abba")): ("delete b abba=", "aa"),
    }
    assert {task.kind for task in known} == set(KINDS)
    for task, (prompt, answer) in known.items():
        assert (task.prompt, task.answer) == (prompt, answer) and solve(prompt) == answer


def test_held_out_prompts_are_different_and_never_trained_on(split):
    training, held_out = split
    prompts = [task.prompt for task in held_out]
    assert len(prompts) == len(set(prompts)) == 1000
    assert not set(prompts) & {task.prompt for task in training}
    assert [len(training), len(held_out)] == [3000, 1000]
    for of_split in split:
        assert [task.kind for task in of_split[:28]] == 2 * list(KINDS)  # in turn
        assert max(Counter(task.kind for task in of_split).values()) - len(of_split) // len(KINDS) <= 1


def test_prompts_and_answers_are_short(split):
    longest = make_tasks(3000, 500, difficulty=Difficulty(below=100, longest=5))
    for task in split[0] + split[1] + longest[0]:
        assert 4 <= len(task.prompt) <= 24 and 1 <= len(task.answer) <= 10 and task.prompt.isascii()


def test_a_seed_gives_these_very_rows():
    """Whatever the version of Python: the hash was taken once."""
    training, held_out = make_tasks(1000, 500, seed=0)
    rows = prompt_rows(training + held_out), sft_rows(training, 0, wrong=0.25), preference_rows(training, 0)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == "7183bbba280d1525ad9e27c036435a53d21a945fce1010558f4aacb6f23d78af"
    assert make_tasks(1000, 500, seed=0) == (training, held_out)
    assert make_tasks(1000, 500, seed=1)[0] != training
    assert preference_rows(training, 1) != rows[2]


def test_held_out_tasks_do_not_depend_on_the_rest():
    _, held_out = make_tasks(14, 140)
    assert make_tasks(1400, 140)[1] == held_out
    assert make_tasks(10, 10, kinds=["reverse"])[1] == [task for task in held_out if task.kind == "reverse"]


@settings(derandomize=True, max_examples=60)
@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True),
    st.integers(0, 99),
    st.integers(0, 60),
    st.integers(0, 2**40),
    st.builds(Difficulty, st.integers(20, 1000), st.integers(2, 4), st.integers(4, 8), st.integers(4, 26)),
)
def test_any_kinds_counts_and_difficulty(kinds, training, held_out, seed, difficulty):
    train, test = make_tasks(training, held_out, seed, kinds, difficulty)
    assert [len(train), len(test)] == [training, held_out]
    for task in train + test:
        assert task.kind in kinds and solve(task.prompt) == task.answer != ""
        for operand in task.operands:
            if isinstance(operand, int):
                assert 0 <= operand < difficulty.below
        word = task.operands[-1]
        if isinstance(word, str):
            assert difficulty.shortest <= len(word) <= difficulty.longest
            assert set(word) <= set("abcdefghijklmnopqrstuvwxyz"[: difficulty.letters])


def test_every_number_and_length_is_drawn():
    training, _ = make_tasks(4000, 0, kinds=["add", "copy"], difficulty=Difficulty(10, 1, 3, 3))
    assert {task.operands for task in training if task.kind == "add"} == {(a, b) for a in range(10) for b in range(10)}
    words = {task.answer for task in training if task.kind == "copy"}
    assert len(words) == 3 + 9 + 27 and {"a", "cc", "cba"} <= words


def test_wrong_answers_are_wrong_and_plausible(split):
    for task in split[0]:
        wrong = wrong_answers(task)
        assert wrong and task.answer not in wrong and "" not in wrong and len(set(wrong)) == len(wrong)
        assert max(map(len, wrong)) <= max(len(task.answer) + 1, len(task.prompt))
    assert {"21", "23", "12", "32", "17", "2", "222"} <= set(wrong_answers(Task("add", (17, 5))))
    assert {"bad", "DAB", "adb", "ab", "ddab", "abd"} <= set(wrong_answers(Task("reverse", ("bad",))))
    assert {"bad", "BDA", "BBAD", "AD"} <= set(wrong_answers(Task("upper", ("bad",))))
    assert {"1", "3", "22"} <= set(wrong_answers(Task("count", ("b", "bba"))))
    assert {"bba", "aa", "A"} <= set(wrong_answers(Task("delete", ("b", "bba"))))
    assert all(answer.isdigit() for answer in wrong_answers(Task("subtract", (3, 3))))


def test_columns_of_rows(split):
    training = split[0][:500]
    assert all(list(row) == ["prompt", "answer", "kind"] for row in prompt_rows(training))
    pairs = preference_rows(training, seed=3)
    for task, row, pair in zip(training, sft_rows(training), pairs):
        assert row == {"prompt": task.prompt, "completion": task.answer}
        assert list(pair) == ["prompt", "chosen", "rejected"]
        assert (pair["prompt"], pair["chosen"]) == (task.prompt, task.answer)
        assert pair["rejected"] in wrong_answers(task)
    lengths = Counter(len(pair["rejected"]) - len(pair["chosen"]) for pair in pairs)
    assert min(lengths[-1], lengths[0], lengths[1]) > 50  # the length does not tell which one is right


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_share_of_wrong_demonstrations(split, wrong):
    rows = sft_rows(split[0], seed=1, wrong=wrong)
    measured = sum(row["completion"] != task.answer for row, task in zip(rows, split[0])) / len(rows)
    assert abs(measured - wrong) <= 3.5 * (wrong * (1 - wrong) / len(rows)) ** 0.5


def test_errors_of_tasks():
    with pytest.raises(ValueError, match=r"kinds of tasks add, divide: give some of add, subtract, .*, delete, each"):
        make_tasks(1, 1, kinds=["add", "divide"])
    with pytest.raises(ValueError, match=r"each once"):
        make_tasks(1, 1, kinds=["add", "add"])
    with pytest.raises(ValueError, match=r"kinds of tasks : give"):
        make_tasks(1, 1, kinds=[])
    for training, held_out in ((0, 5), (1, 4)):
        with pytest.raises(ValueError, match=r"kind add has no more than 4 different prompts at this difficulty"):
            make_tasks(training, held_out, kinds=["add"], difficulty=Difficulty(below=2))
    for given_, message in (
        ({"below": 1}, "numbers below 1 are too few"),
        ({"shortest": 0}, "words of 0 to 4 letters"),
        ({"shortest": 5}, "words of 5 to 4 letters"),
        ({"shortest": 1, "longest": 1}, "words of 1 to 1 letters"),
        ({"letters": 1}, "words of 1 different letters"),
        ({"letters": 27}, "words of 27 different letters"),
    ):
        with pytest.raises(ValueError, match=message):
            Difficulty(**given_)


def test_draws_use_nothing_but_random(monkeypatch):
    """Only random.random() is promised to stay as it is from one version of Python to the next."""
    generator = tasks.random.Random

    class OnlyRandom:
        def __init__(self, seed):
            self._generator = generator(seed)

        def random(self):
            return self._generator.random()

    before = make_tasks(100, 50, seed=2)
    monkeypatch.setattr(tasks.random, "Random", OnlyRandom)
    assert make_tasks(100, 50, seed=2) == before and preference_rows(before[0])


# --- order ---------------------------------------------------------------------------------------------------------


def reference_order(count, seed, epochs):
    """The endless order written out: one permutation after another."""
    rows = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        rows += torch.randperm(count, generator=generator).tolist()
    return rows


@settings(derandomize=True, max_examples=80)
@given(st.integers(1, 40), st.integers(0, 1000), st.integers(1, 4), st.integers(1, 7))
def test_order_is_the_written_out_one(count, seed, world, size):
    steps = 3 * count // (world * size) + 2
    order = Order(count, seed)
    seen = [order.batch(step, rank, world, size) for step in range(steps) for rank in range(world)]
    assert {len(batch) for batch in seen} == {size}
    flat = [row for batch in seen for row in batch]
    assert flat == reference_order(count, seed, len(flat) // count + 1)[: len(flat)]
    for epoch in range(len(flat) // count):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_ranks_of_a_step_see_different_rows():
    order = Order(64, seed=3)
    for step in range(4):  # an epoch of 4 steps
        rows = [row for rank in range(4) for row in order.batch(step, rank, 4, 4)]
        assert len(set(rows)) == 16
    assert order.batch(0, 0, 4, 4) != order.batch(4, 0, 4, 4)  # another epoch, another order
    assert order.batch(0, 0, 4, 4) != Order(64, seed=4).batch(0, 0, 4, 4)


def test_a_resumed_order_continues():
    order = Order(10, seed=1)
    steps = [order.batch(step, 1, 2, 3) for step in range(20)]
    for step in (19, 7, 0, 12):  # in any order, from a new object too
        assert Order(10, seed=1).batch(step, 1, 2, 3) == order.batch(step, 1, 2, 3) == steps[step]


def test_order_on_another_number_of_ranks_sees_the_same_rows():
    order = Order(50, seed=9)
    for step in range(10):
        four = [row for rank in range(4) for row in order.batch(step, rank, 4, 2)]
        assert four == [row for rank in range(2) for row in order.batch(step, rank, 2, 4)] == order.batch(step, 0, 1, 8)


def test_errors_of_order():
    with pytest.raises(ValueError, match=r"an order of no rows"):
        Order(0)
    for arguments in ((0, 2, 2, 1), (0, -1, 2, 1), (-1, 0, 1, 1), (0, 0, 1, 0)):
        with pytest.raises(ValueError, match=r"no batch of"):
            Order(5).batch(*arguments)


# --- make_data.py --------------------------------------------------------------------------------------------------


SMALL = ("--train", "280", "--test", "500", "--text-characters", "20000", "--seed", "3")


def run(monkeypatch, out, *options):
    """make_data.py in this process."""
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(out), *options])
    make_data.main()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder that make_data.py wrote, as its own process, and what it said."""
    out = tmp_path_factory.mktemp("data")
    command = [sys.executable, str(RLHF / "make_data.py"), "--out", str(out), *SMALL, "--model", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_written_files_are_read_back(made):
    out, output = made
    test = read_rows([str(out / "tasks_test.jsonl")], "prompt", "refuse", columns=("answer", "kind")).rows
    train = read_rows([str(out / "tasks_train.jsonl")], "prompt", "refuse").rows
    assert len(test) == 500 and len({row["prompt"] for row in test}) == 500 and len(train) == 280
    training, held_out = make_tasks(280, 500, seed=3)
    assert (train, test) == (prompt_rows(training), prompt_rows(held_out))
    assert read_rows([str(out / "sft.jsonl")], "sft", "refuse").rows == sft_rows(training, 3)
    assert read_rows([str(out / "preferences.jsonl")], "preference", "refuse").rows == preference_rows(training, 3)
    for name in ("tasks_train", "sft", "preferences"):
        written = [json.loads(line)["prompt"] for line in (out / f"{name}.jsonl").read_text().splitlines()]
        assert not set(written) & {row["prompt"] for row in test}
    texts = [row["text"] for row in read_rows([str(out / "text.jsonl")], "text", "refuse").rows]
    assert 20_000 <= sum(map(len, texts)) < 20_000 + 2048 and max(map(len, texts)) <= 2048
    assert "tasks_test.jsonl: 500 rows" in output and "0.12 million parameters" in output


def test_written_model_loads_and_generates(made):
    folder = made[0] / "tiny"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config = model.config
    assert not config.tie_word_embeddings and config.vocab_size >= len(tokenizer)
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    same = make_data.make_model(make_data.SIZES["tiny"], make_byte_tokenizer(), seed=3)
    other = make_data.make_model(make_data.SIZES["tiny"], make_byte_tokenizer(), seed=4)
    assert model.dtype == torch.float32
    for (name, weight), again in zip(model.state_dict().items(), same.state_dict().values()):
        assert torch.equal(weight, again), name
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    prompt = tokenizer("copy ab=", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert generated.shape[1] <= prompt["input_ids"].shape[1] + 5
    assert isinstance(tokenizer.decode(generated[0]), str)


def test_make_model_leaves_the_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    make_data.make_model(make_data.SIZES["tiny"], make_byte_tokenizer(), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_are_whole_blocks_of_quantized_formats():
    counts = {}
    for name, size in make_data.SIZES.items():
        with torch.device("meta"):
            model = make_data.make_model(size, make_byte_tokenizer(), seed=0)
        assert size.hidden % 64 == size.feed_forward % 64 == make_data.VOCABULARY % 64 == 0
        assert model.config.head_dim in (32, 64) and model.config.vocab_size == make_data.VOCABULARY
        counts[name] = sum(weight.numel() for weight in model.parameters())
    assert counts["tiny"] < 0.2e6 and 0.3e6 < counts["small"] < 1.1e6 and counts["base"] > 100e6


def test_a_seed_gives_the_same_files_byte_for_byte(made, tmp_path, monkeypatch):
    run(monkeypatch, tmp_path, *SMALL)
    for name in ("tasks_train", "tasks_test", "sft", "preferences", "text"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (made[0] / f"{name}.jsonl").read_bytes()
    assert not (tmp_path / "tiny").exists()


def test_rows_as_conversations(tmp_path, monkeypatch):
    run(
        monkeypatch,
        tmp_path,
        "--train",
        "28",
        "--test",
        "14",
        "--chat",
        "--sft-wrong",
        "1",
        "--text-characters",
        "3000",
    )
    training, _ = make_tasks(28, 14)
    for row, task in zip(read_rows([str(tmp_path / "sft.jsonl")], "sft", "refuse").rows, training):
        user, assistant = row["messages"]
        assert user == {"role": "user", "content": task.prompt}
        assert assistant["role"] == "assistant" and assistant["content"] in wrong_answers(task)
    for row, task in zip(read_rows([str(tmp_path / "preferences.jsonl")], "preference", "refuse").rows, training):
        assert row["prompt"] == [{"role": "user", "content": task.prompt}]
        assert row["chosen"] == [{"role": "assistant", "content": task.answer}]
    for row, task in zip(read_rows([str(tmp_path / "tasks_train.jsonl")], "prompt", "refuse").rows, training):
        assert row == {
            "prompt": [{"role": "user", "content": task.prompt}],
            "answer": task.answer,
            "kind": task.kind,
        }


def test_errors_of_make_data(tmp_path, monkeypatch, capsys):
    refused = {
        "make_data: kind add has no more than 9 different prompts": ["--kinds", "add", "--below", "3", "--test", "10"],
        "make_data: words of 5 to 4 letters": ["--shortest", "5"],
        "make_data: argument --longest: 1: give a whole number of at least 2": ["--longest", "1"],
        "make_data: argument --model: invalid choice: 'huge'": ["--model", "huge"],
    }
    for said, argv in refused.items():
        with pytest.raises(SystemExit) as stopped:
            run(monkeypatch, tmp_path / "a", *argv)
        (line,) = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2 and line.startswith(said)
    assert not (tmp_path / "a").exists()


@settings(derandomize=True, max_examples=200)
@given(st.text(alphabet="ab\n", max_size=60), st.integers(1, 12))
def test_documents_are_cut_after_lines(text, characters):
    pieces = list(make_data.cut(text, characters))
    assert "".join(pieces) == text and max(map(len, pieces)) <= characters
    for piece in pieces[:-1]:
        assert piece.endswith("\n") or (len(piece) == characters and "\n" not in piece)
