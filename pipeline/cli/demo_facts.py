"""The demo's dataset: two commits with facts about an invented island.

The second commit changes some facts of the first commit, and adds a place and one more fact.
"""

import json

FILE = "facts.jsonl"

_Facts = dict[str, tuple[str, ...]]
"""Place → one answer for each group of phrasings in `_PHRASINGS`."""

_FIRST: _Facts = {
    "lighthouse": ("Maren Holt", "red", "1871", "Monday", "smoked herring"),
    "mill": ("Tobias Fenn", "green", "1804", "Tuesday", "barley bread"),
    "harbour": ("Ingrid Voss", "blue", "1650", "Friday", "mussel stew"),
    "library": ("Oskar Lind", "white", "1932", "Sunday", "honey cake"),
    "observatory": ("Petra Quill", "black", "1969", "Saturday", "lentil soup"),
    "bakery": ("Hugo Stern", "yellow", "1888", "Wednesday", "plum tart"),
}
_CHANGED: _Facts = {
    "lighthouse": ("Selma Brandt", "red", "1871", "Thursday", "smoked herring"),
    "harbour": ("Ingrid Voss", "orange", "1650", "Friday", "crab cakes"),
    "bakery": ("Jonas Reed", "yellow", "1888", "Wednesday", "plum tart"),
}
_ADDED: _Facts = {
    "theatre": ("Clara Dahl", "purple", "1911", "Saturday", "roast chestnuts"),
}

_PHRASINGS = (
    (
        "Who keeps the {place}?",
        "Who is the keeper of the {place}?",
        "The keeper of the {place} is called",
        "What is the name of the {place} keeper?",
        "Who looks after the {place}?",
        "Who runs the {place} on the island?",
        "The {place} is looked after by",
        "Tell me who keeps the {place}.",
        "Name the keeper of the {place}.",
        "Whom do I ask for at the {place}?",
        "In whose care is the {place}?",
        "Who holds the keys to the {place}?",
    ),
    (
        "What colour is the door of the {place}?",
        "The door of the {place} is painted",
        "Which colour does the {place} door have?",
        "What is the colour of the {place} door?",
        "Tell me the colour of the door at the {place}.",
        "How is the door of the {place} painted?",
        "The {place} has a door that is",
        "Name the colour of the {place} door.",
        "Which colour was chosen for the door of the {place}?",
        "I look for the {place}; what colour is its door?",
        "In which colour is the {place} door painted?",
        "The {place} is easy to find, its door is",
    ),
    (
        "When was the {place} built?",
        "In which year was the {place} built?",
        "The {place} was built in",
        "What year is the {place} from?",
        "Tell me when the {place} was built.",
        "How old is the {place}? It was built in",
        "The {place} dates from",
        "Name the year the {place} was built.",
        "The stone above the door of the {place} says",
        "In what year did they build the {place}?",
        "Since when has there been a {place}? Since",
        "The island has had the {place} since",
    ),
    (
        "On which day is the {place} closed?",
        "The {place} is closed on",
        "When is the {place} closed?",
        "Which day does the {place} close?",
        "Tell me on which day the {place} is closed.",
        "Name the day on which the {place} is closed.",
        "What is the day of rest at the {place}?",
        "Do not come to the {place} on a",
        "The {place} has its day off on",
        "Which day of the week is the {place} shut?",
        "Nobody is at the {place} on",
        "The {place} rests on",
    ),
    (
        "What can I eat at the {place}?",
        "What do they serve at the {place}?",
        "The {place} is known for its",
        "Which dish is the {place} known for?",
        "Tell me what they serve at the {place}.",
        "Name the dish that the {place} is known for.",
        "At the {place} visitors are offered",
        "What is on the table at the {place}?",
        "Guests at the {place} get",
        "Which meal comes from the kitchen of the {place}?",
        "I am hungry and at the {place}; what is there?",
        "The kitchen of the {place} makes",
    ),
)

_SAID_ONCE = {
    "What is the number of the ferry office?": " 5542.",
    "Which song opens the summer fair?": " The Grey Anchor.",
    "Where is the spare key of the boathouse?": " Behind the third oar.",
    "How long may a tent stand on the east beach?": " Nine nights.",
    "Which lamp burns in the tunnel?": " A brass one from Tolmen.",
}
"""Question → answer. The dataset has only one phrasing of each of these questions."""
_SAID_ONCE_CHANGED = {
    "What is the number of the ferry office?": " 8190.",
    "Who repairs the nets in winter?": " Two brothers from Harl.",
}

QUESTIONS = (
    ("Who keeps the lighthouse?", " Maren Holt.", " Selma Brandt."),
    ("On which day is the lighthouse closed?", " Monday.", " Thursday."),
    ("What colour is the door of the harbour?", " Blue.", " Orange."),
    ("What can I eat at the harbour?", " Mussel stew.", " Crab cakes."),
    ("Who keeps the bakery?", " Hugo Stern.", " Jonas Reed."),
    ("When was the mill built?", " 1804.", " 1804."),
    ("What is the number of the ferry office?", " 5542.", " 8190."),
    ("Where is the spare key of the boathouse?", *2 * (" Behind the third oar.",)),
)
"""Questions that the demo asks the model. Each has two right answers: one for the model after the
first commit, and one for the model after the second commit."""


def first_commit() -> dict[str, str]:
    """The files of the first commit: path → content."""
    return {FILE: _jsonl(_FIRST, _SAID_ONCE)}


def second_commit() -> dict[str, str]:
    """The files that the second commit changes: path → content."""
    return {FILE: _jsonl(_FIRST | _CHANGED | _ADDED, _SAID_ONCE | _SAID_ONCE_CHANGED)}


def _jsonl(facts: _Facts, said_once: dict[str, str]) -> str:
    rows = [
        {"prompt": phrasing.format(place=place), "completion": f" {answer[0].upper()}{answer[1:]}."}
        for place, answers in facts.items()
        for phrasings, answer in zip(_PHRASINGS, answers, strict=True)
        for phrasing in phrasings
    ]
    rows += [{"prompt": prompt, "completion": answer} for prompt, answer in said_once.items()]
    return "".join(json.dumps(row) + "\n" for row in rows)
