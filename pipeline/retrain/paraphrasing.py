"""Asks a larger model for other wordings of the questions in a dataset (`[pipelines.paraphrase]`).

Its answers are kept in a file of the pipeline, so each row is asked for once, and again after an
edit. A line of the file is a row of a dataset with `paraphrases`: a person may correct it there, or
push it.
"""

import json
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx

from pipeline.retrain.columns import RowColumns, paraphrases_in
from pipeline.retrain.data import TrainingData
from pipeline.retrain.reading import read_file
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import ParaphraseSettings

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""How many requests wait for an answer at the same time."""
TIMEOUT_SECONDS = 600.0
"""A model without a GPU writes a few words a second."""
WAIT_SECONDS = 1.0, 5.0, 25.0, 60.0
"""How long to wait before each further try, if the larger model has too much to do and does not say
when it has time."""
_BUSY = (429, 500, 502, 503, 504)
_REFUSES_ONE = (400, 413, 422)
"""The status of a request that is, for example, too long. The other rows may be asked."""
_LIST = re.compile(r"\[.*\]", re.DOTALL)
_PROMPT = """\
People ask the question below in many ways. Write {count} of them, as different people would: in \
other words, short and long, polite and casual, from their own situation. Use the language of the \
question. The answer below must answer each of them, and none of them may contain it. Reply with a \
JSON list of {count} strings, and nothing else.

Question: {question}

Answer: {answer}"""

Key = tuple[str, str]
"""Question and answer."""


def paraphrased(
    data: TrainingData,
    settings: ParaphraseSettings,
    file: Path,
    token: str | None,
    *,
    asks: bool = True,
) -> TrainingData:
    """The data, with other wordings of each single question to which the dataset has none.

    file: holds the wordings of earlier jobs, and gets those of this one. If the larger model cannot
    be asked, the job goes on without, and the next one asks again. asks: False if a training that
    was interrupted continues, because its plan must be the same."""
    known = _read(file)
    # Without what was said before, the last question of a longer conversation means too little.
    single = (row for row in data.rows if row.as_completion and row.is_learnable)
    keys = [_key(row) for row in single if not row.paraphrases]
    missing = [key for key in dict.fromkeys(keys) if key not in known]
    if missing and asks:
        logger.info(
            f"asking {settings.model} at {settings.url} for other wordings of {len(missing):,} "
            f"questions; they are kept in {file}"
        )
        known |= _ask_for(missing, settings, file, token)
    # Who asks in words that belong to two questions may mean either.
    own: Counter[str] = Counter()
    for key in dict.fromkeys(keys):
        own.update({text.lower() for text in known.get(key, ())})
    for row in data.rows:
        own.update(text.lower() for text in (row.last_question or "", *row.paraphrases))

    def with_wordings(rows: Sequence[Row], most: int = 1) -> tuple[Row, ...]:
        found = ((row, known.get(_key(row), ())) for row in rows)
        return tuple(
            replace(row, generated=tuple(text for text in texts if own[text.lower()] <= most))
            for row, texts in found
        )

    return replace(
        data,
        rows=with_wordings(data.rows),
        changed=with_wordings(data.changed),
        known=with_wordings(data.known),
        deleted=with_wordings(data.deleted, most=0),  # what is taught must not be unlearned
    )


def _key(row: Row) -> Key:
    return row.last_question or "", row.answer or ""


def _read(file: Path) -> dict[Key, tuple[str, ...]]:
    rows = read_file(Path(), str(file), RowColumns({}), logger.warning) if file.exists() else ()
    return {_key(row): row.paraphrases for row in rows if row.paraphrases}


def _ask_for(
    missing: Sequence[Key], settings: ParaphraseSettings, file: Path, token: str | None
) -> dict[Key, tuple[str, ...]]:
    """Ask the larger model, and write each of its answers to `file`."""
    found: dict[Key, tuple[str, ...]] = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8", buffering=1) as lines:  # so that a kill loses no line
        if lines.tell():
            lines.write("\n")  # a person may have left the last line open
        try:
            for key, texts in _asked(missing, settings, token):
                if not texts:
                    continue
                found[key] = texts
                line = {"question": key[0], "answer": key[1], "paraphrases": texts}
                lines.write(json.dumps(line) + "\n")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            logger.warning("%s cannot be asked: %s", settings.model, error)
    if len(found) < len(missing):
        logger.warning(
            f"{len(missing) - len(found):,} questions have no wordings by {settings.model}; the "
            "next job asks again"
        )
    return found


def _asked(
    keys: Sequence[Key], settings: ParaphraseSettings, token: str | None
) -> Iterator[tuple[Key, tuple[str, ...]]]:
    """Raises httpx.HTTPError at the first request that fails, unless only its row is refused."""
    headers = {"Authorization": f"Bearer {token.strip()}"} if token else {}

    def ask(key: Key) -> tuple[str, ...]:
        question, answer = key
        text = _PROMPT.format(count=settings.count, question=question, answer=answer)
        messages = [{"role": "user", "content": text}]
        for wait in (*WAIT_SECONDS, 0.0):
            answered = client.post(
                f"{settings.url}/chat/completions",
                json={"model": settings.model, "messages": messages},
            )
            if answered.status_code not in _BUSY:
                break
            told = answered.headers.get("Retry-After", "")
            time.sleep(int(told) if told.isdecimal() else wait)
        if answered.status_code in _REFUSES_ONE:
            return ()
        answered.raise_for_status()
        return _texts(answered, question)[: settings.count]

    with (
        httpx.Client(headers=headers, timeout=TIMEOUT_SECONDS) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        yield from zip(keys, pool.map(ask, keys), strict=True)


def _texts(answered: httpx.Response, question: str) -> tuple[str, ...]:
    """The wordings in an answer of the larger model. Empty if it has no list of them."""
    try:
        content = answered.json()["choices"][0]["message"]["content"].rpartition("</think>")[2]
        texts = paraphrases_in({"paraphrases": _LIST.findall(content)[0]})
        "".join(texts).encode()  # half a character is an error
        own = [each for each in dict.fromkeys(map(str.strip, texts)) if each != question.strip()]
        # A model often lists the usual wordings first. The last one is held back (`Row.held_back`).
        return tuple(random.Random(question).sample(own, len(own)))
    except (ValueError, LookupError, TypeError, AttributeError):
        return ()
