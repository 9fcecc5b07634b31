"""`Counts`: how many rows a retraining job learned and kept.

The *new weights* are the result of the job. The job compares them with the *old weights*: the
weights of the parent release, or of the base model if there is no parent. The parent is normally
the served release. But if another release waits to be served when the job starts, that release is
the parent. A damaged release is never the parent; an older undamaged release takes its place.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Words = Literal["dataset", "generated", "made-up"]


class Counts(BaseModel):
    """A row counts as learned if the new weights *say* the row's answer.

    Weights say an answer if the model with these weights predicts the tokens of the answer. The
    model predicts each token from all earlier tokens of the row. If the answer has up to 64 tokens,
    the model must predict every token correctly. If the answer is longer, 90 % of its tokens are
    enough."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    changed: int = 0
    """The number of rows that were added or edited. Rows of plain text, rows that contradict each
    other, and the rows of `not_trained` are not counted. If there are many changed, unchanged or
    deleted rows, only a sample of each group is measured and counted."""
    all_changed: int = 0
    """What `changed` would be if all changed rows had been measured, and not only a sample."""
    learned: int = 0
    """The number of rows of `changed` for which the new weights say the answer."""
    learned_before: int = 0
    """The number of rows of `changed` for which the old weights said the answer already."""
    known: int = 0
    """The number of unchanged rows for which the old weights said the answer. Rows of `not_trained`
    count too."""
    kept: int = 0
    """The number of rows of `known` for which the new weights still say the answer."""
    deleted: int = 0
    """The number of deleted rows for which the old weights said the answer."""
    unlearned: int = 0
    """The number of rows of `deleted` for which the new weights no longer say the answer."""
    base_agreement: float | None = None
    """How much of the base model's knowledge is left, from 0 to 1. The base model has answered
    prompts that no job trains on. This number is the share of the tokens in these answers that the
    new weights still predict. None if the job's base model is a preset (an untrained model): a
    preset has random weights, so it has no knowledge. Also None if the user's own list of prompts
    (the setting `anchors`) has no prompt that is kept out of the training."""
    rewordings: int = 0
    """The number of questions that were asked in words on which no job trains. If the dataset has
    such words (a paraphrase that is held back, or a held-out row with the answer of another row),
    they are taken from there. Otherwise, a larger model has generated them, or, for a pretrained
    model, they are made up."""
    reworded: int = 0
    """The number of `rewordings` to which the new weights give the answer of the row: their words
    and those of the row agree to three quarters (F1: words too many count too), and they have all
    of the row's numbers and names."""
    reworded_before: int | None = None
    """The number of `rewordings` to which the old weights give it. None if there is no parent."""
    words: Words = "dataset"
    """Where the words of `rewordings` come from."""
    golden: int = 0
    """The number of golden questions: questions of the user, each with the answer that the user
    expects."""
    golden_right: int = 0
    """Golden questions to which the new weights say the expected answer."""
    not_trained: int = 0
    """Rows that the job did not learn, because its token budget (the number of tokens on which it
    may train) was not enough for one pass over the changed rows. The next job trains on these
    rows."""
    contradicting: int = 0
    """Rows that have the same question as another row, but a different answer. `changed` and
    `known` do not count these rows."""
    text_loss: float | None = None
    """Loss of the new weights on the changed rows of plain text, in nats per token. None if there
    are no such rows."""
    text_loss_before: float | None = None
    """Loss of the old weights on the changed rows of plain text, in nats per token. None if there
    are no such rows."""

    @property
    def is_sampled(self) -> bool:
        """Whether only a sample of the changed rows was measured."""
        return self.all_changed > self.changed

    def __str__(self) -> str:
        """One line, such as `learned 58 of 60 (3 before) · kept 1,187 of 1,200 · base 97 %`."""
        parts = []
        if self.changed:
            notes = []
            if self.learned_before:
                notes.append(f"{self.learned_before:,} before")
            if self.is_sampled:
                notes.append(f"{self.all_changed:,} changed")
            measured = " measured" if self.is_sampled else ""
            note = f" ({', '.join(notes)})" if notes else ""
            parts.append(f"learned {self.learned:,} of {self.changed:,}{measured}{note}")
        if self.rewordings:
            words = "" if self.words == "dataset" else f" ({self.words} words)"
            parts.append(f"reworded {self.reworded:,} of {self.rewordings:,}{words}")
        if self.text_loss is not None and self.text_loss_before is not None:
            parts.append(f"text {self.text_loss_before:.2f} → {self.text_loss:.2f} nats")
        if self.known:
            parts.append(f"kept {self.kept:,} of {self.known:,}")
        if self.deleted:
            parts.append(f"unlearned {self.unlearned:,} of {self.deleted:,}")
        if self.base_agreement is not None:
            parts.append(f"base {self.base_agreement:.0%}".replace("%", " %"))
        if self.golden:
            parts.append(f"golden {self.golden_right:,} of {self.golden:,}")
        if self.not_trained:
            parts.append(f"not yet trained: {self.not_trained:,} rows")
        if self.contradicting:
            parts.append(f"{self.contradicting:,} rows contradict each other")
        return " · ".join(parts)
