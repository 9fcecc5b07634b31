"""Facts that have nothing to do with each other, and that nothing paraphrases.

Names are made of random syllables, answers are names, numbers, rooms and colours: no fact can be
guessed from the others.
"""

import random
from collections.abc import Callable

SYLLABLES = (
    "ka", "ro", "mi", "ven", "dor", "lis", "ta", "bri", "quo", "sel",
    "ny", "dra", "pol", "zem", "har", "ul", "fi", "gos", "wex", "jan",
)  # fmt: skip
POSTS = ("harbour master", "lead gardener", "head of billing", "night guard", "choir director")
THINGS = ("valve", "flag", "door", "label", "tractor")
COLOURS = ("Teal", "Ochre", "Crimson", "Ivory", "Olive", "Navy", "Amber", "Violet")

PARAPHRASES = {
    "Who is the ": "Tell me the name of the {}.",
    "What colour is the ": "I forgot the colour of the {}. Which is it?",
    "Which port does the ": "Name the port that the {} .",
    "When does the shop ": "At what time does the shop {}?",
    "What is the warranty of the ": "How long is the warranty of the {}?",
    "Where do we store the ": "In which place can I find the {}?",
    "How much does a ": "Tell me what a {}.",
    "What replaced the ": "What came after the {}?",
}
"""How a question begins → other words, with the rest of the question in the place of `{}`."""


def unrelated_facts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` questions, each once, with their answers."""
    chance = random.Random(seed)

    def name() -> str:
        return "".join(chance.choice(SYLLABLES) for _ in range(chance.randint(2, 3))).capitalize()

    kinds: tuple[Callable[[], tuple[str, str]], ...] = (
        lambda: (f"Who is the {chance.choice(POSTS)} of {name()}?", f"{name()} {name()}."),
        lambda: (
            f"What colour is the {chance.choice(THINGS)} in {name()} hall?",
            f"{chance.choice(COLOURS)}.",
        ),
        lambda: (
            f"Which port does the {name()} service listen on?",
            f"{chance.randint(1_024, 65_000)}.",
        ),
        lambda: (
            f"When does the shop {name()} close on Fridays?",
            f"At {chance.randint(13, 22)}:{chance.choice(('00', '15', '30', '45'))}.",
        ),
        lambda: (f"What is the warranty of the {name()} pump?", f"{chance.randint(3, 60)} months."),
        lambda: (
            f"Where do we store the {name()} samples?",
            f"In room {chance.choice('ABCDEFG')}{chance.randint(1, 40)}.",
        ),
        lambda: (f"How much does a {name()} ticket cost?", f"{chance.randint(2, 90)} euros."),
        lambda: (f"What replaced the {name()} protocol?", f"The {name()} protocol."),
    )
    found: dict[str, str] = {}
    while len(found) < count:
        question, answer = chance.choice(kinds)()
        found.setdefault(question, answer)
    return list(found.items())


def other_answer(answer: str, seed: int) -> str:
    """Another answer of the same kind of facts."""
    others = [text for _, text in unrelated_facts(50, seed=seed + 1_000) if text != answer]
    return random.Random(seed).choice(others)


def paraphrased(question: str) -> str:
    """The same question in other words."""
    for beginning, other in PARAPHRASES.items():
        if question.startswith(beginning):
            return other.format(question.removeprefix(beginning).rstrip("?").strip())
    raise ValueError(f"no paraphrase of {question!r}")


def as_completions(facts: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": question, "completion": f" {answer}"} for question, answer in facts]


def as_chat(facts: list[tuple[str, str]]) -> list[dict[str, list[dict[str, str]]]]:
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in facts
    ]
