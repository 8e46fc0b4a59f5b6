"""Tasks with exact answers: arithmetic and string transformations; and pairs of a right and a wrong answer.

Every draw comes from random.Random(...).random(), whose numbers Python promises to keep, so a seed gives the same bytes
everywhere. Rows have TRL's columns.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DRAWS = 10_000  # so many draws without a new prompt mean that there is none


class Draws:
    """Whole numbers and choices made from random() alone."""

    def __init__(self, *seed: object) -> None:
        self._random = random.Random(" ".join(map(str, seed)))

    def below(self, count: int) -> int:
        """A whole number from 0 to count - 1."""
        return int(self._random.random() * count)

    def choice(self, options: Sequence):
        return options[self.below(len(options))]


@dataclass(frozen=True)
class Difficulty:
    """How large numbers are and how long words. A prompt has at most 10 characters beside its numbers or word."""

    below: int = 30  # numbers are 0 ... below - 1
    shortest: int = 2  # letters in a word
    longest: int = 4
    letters: int = 12  # words are made of the first so many letters of the alphabet

    def __post_init__(self) -> None:
        if self.below < 2:
            raise ValueError(f"numbers below {self.below} are too few; give at least 2")
        if not 1 <= self.shortest <= self.longest or self.longest < 2:
            raise ValueError(f"words of {self.shortest} to {self.longest} letters; give 1 <= shortest <= longest >= 2")
        if not 2 <= self.letters <= 26:
            raise ValueError(f"words of {self.letters} different letters; give 2 to 26")


def two_numbers(draws: Draws, difficulty: Difficulty) -> tuple[int, int]:
    return draws.below(difficulty.below), draws.below(difficulty.below)


def descending_numbers(draws: Draws, difficulty: Difficulty) -> tuple[int, int]:
    first, second = two_numbers(draws, difficulty)
    return max(first, second), min(first, second)


def one_word(draws: Draws, difficulty: Difficulty, letters: int | None = None) -> tuple[str]:
    length = difficulty.shortest + draws.below(difficulty.longest - difficulty.shortest + 1)
    return ("".join(string.ascii_lowercase[draws.below(letters or difficulty.letters)] for _ in range(length)),)


def letter_and_word(draws: Draws, difficulty: Difficulty) -> tuple[str, str]:
    """One letter of the word, which also has another letter. Few different letters, so that some come twice."""
    word = ""
    while len(set(word)) < 2:
        (word,) = one_word(draws, difficulty, letters=min(5, difficulty.letters))
    return draws.choice(word), word


@dataclass(frozen=True)
class Kind:
    """One kind of task: how its operands are drawn, put to the model and answered.

    `confused_with` are kinds with the same operands whose answer is a plausible mistake.
    """

    draw: Callable[[Draws, Difficulty], tuple]
    prompt: str
    answer: Callable[..., str]
    confused_with: tuple[str, ...] = ()


KINDS = {
    "add": Kind(two_numbers, "{}+{}=", lambda a, b: str(a + b), ("subtract", "max")),
    "subtract": Kind(descending_numbers, "{}-{}=", lambda a, b: str(abs(a - b)), ("add", "min")),
    "max": Kind(two_numbers, "max {} {}=", lambda a, b: str(max(a, b)), ("min", "add")),
    "min": Kind(two_numbers, "min {} {}=", lambda a, b: str(min(a, b)), ("max", "subtract")),
    "count": Kind(letter_and_word, "count {} {}=", lambda letter, word: str(word.count(letter)), ("other_letters",)),
    "length": Kind(one_word, "length {}=", lambda word: str(len(word)), ("copy",)),
    "copy": Kind(one_word, "copy {}=", lambda word: word, ("reverse", "upper")),
    "reverse": Kind(one_word, "reverse {}=", lambda word: word[::-1], ("copy", "sort")),
    "upper": Kind(one_word, "upper {}=", str.upper, ("copy",)),
    "first": Kind(one_word, "first {}=", lambda word: word[0], ("last", "copy")),
    "last": Kind(one_word, "last {}=", lambda word: word[-1], ("first", "copy")),
    "sort": Kind(one_word, "sort {}=", lambda word: "".join(sorted(word)), ("copy", "reverse")),
    "repeat": Kind(one_word, "repeat {}=", lambda word: word + word, ("copy",)),
    "delete": Kind(letter_and_word, "delete {} {}=", lambda letter, word: word.replace(letter, ""), ("keep",)),
}
# Answers to nothing that is asked: mistakes only.
MISTAKES = {
    "other_letters": lambda letter, word: str(len(word) - word.count(letter)),
    "keep": lambda letter, word: word,
}


@dataclass(frozen=True)
class Task:
    """A question with its one right answer."""

    kind: str
    operands: tuple

    @property
    def prompt(self) -> str:
        return KINDS[self.kind].prompt.format(*self.operands)

    @property
    def answer(self) -> str:
        return KINDS[self.kind].answer(*self.operands)


def make_tasks(
    training: int,
    held_out: int,
    seed: int = 0,
    kinds: Sequence[str] = tuple(KINDS),
    difficulty: Difficulty = Difficulty(),
) -> tuple[list[Task], list[Task]]:
    """(training tasks, held-out tasks), kinds in turn.

    Held-out prompts are all different and none of them is trained on; a training prompt may come again where a kind has
    few. The held-out tasks do not depend on `training`, nor those of a kind on which other kinds there are.

    Raises:
        ValueError: unknown kinds, or a kind without enough different prompts at this difficulty.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds or len(set(kinds)) < len(kinds):
        raise ValueError(f"kinds of tasks {', '.join(kinds)}: give some of {', '.join(KINDS)}, each once")
    tested: list[list[Task]] = []
    trained: list[list[Task]] = []
    for index, kind in enumerate(kinds):
        draws, seen = Draws(seed, kind), set()

        def draw(kind=kind, draws=draws, seen=seen) -> Task:
            for _ in range(DRAWS):
                task = Task(kind, KINDS[kind].draw(draws, difficulty))
                if task.prompt not in seen:
                    return task
            raise ValueError(
                f"kind {kind} has no more than {len(seen)} different prompts at this difficulty, all of them held out; "
                "ask for fewer held-out tasks, longer words or larger numbers"
            )

        tested.append([])
        for _ in range(share(held_out, index, len(kinds))):
            tested[-1].append(draw())
            seen.add(tested[-1][-1].prompt)
        trained.append([draw() for _ in range(share(training, index, len(kinds)))])
    return in_turn(trained), in_turn(tested)


def share(count: int, index: int, parts: int) -> int:
    """How many of `count` things dealt in turn to `parts` receivers number `index` gets."""
    return (count - index + parts - 1) // parts


def in_turn(tasks: list[list[Task]]) -> list[Task]:
    """The first task of every kind, then the second of every kind, and so on."""
    longest = max(map(len, tasks))
    return [of_kind[place] for place in range(longest) for of_kind in tasks if place < len(of_kind)]


def wrong_answers(task: Task) -> list[str]:
    """Plausible wrong answers, each once, none equal to the right one, in a fixed order.

    The answer to another question, 1 or 10 more or less, two neighbours exchanged, a character missing or doubled, the
    wrong case.
    """
    right = task.answer
    other = [KINDS[name].answer if name in KINDS else MISTAKES[name] for name in KINDS[task.kind].confused_with]
    wrong = [answer(*task.operands) for answer in other]
    if right.isdigit():
        number = int(right)
        wrong += [str(number + step) for step in (1, -1, 10, -10) if number + step >= 0]
    else:
        wrong.append(right.swapcase())
    for place in range(len(right)):
        wrong.append(right[:place] + right[place + 1 :])
        wrong.append(right[:place] + right[place] + right[place:])
        if place:
            wrong.append(right[: place - 1] + right[place] + right[place - 1] + right[place + 1 :])
    return list(dict.fromkeys(answer for answer in wrong if answer not in ("", right)))


def prompt_rows(tasks: Sequence[Task]) -> list[dict]:
    """Rows {"prompt", "answer", "kind"} for reward functions."""
    return [{"prompt": task.prompt, "answer": task.answer, "kind": task.kind} for task in tasks]


def sft_rows(tasks: Sequence[Task], seed: int = 0, wrong: float = 0.0) -> list[dict]:
    """Rows {"prompt", "completion"}; a share `wrong` of the completions is wrong, as in data that people wrote."""
    draws = Draws(seed, "sft")
    return [
        {
            "prompt": task.prompt,
            "completion": draws.choice(wrong_answers(task)) if draws.below(1000) < 1000 * wrong else task.answer,
        }
        for task in tasks
    ]


def preference_rows(tasks: Sequence[Task], seed: int = 0) -> list[dict]:
    """Rows {"prompt", "chosen", "rejected"}: the right answer and one of wrong_answers()."""
    draws = Draws(seed, "preference")
    return [
        {"prompt": task.prompt, "chosen": task.answer, "rejected": draws.choice(wrong_answers(task))} for task in tasks
    ]
