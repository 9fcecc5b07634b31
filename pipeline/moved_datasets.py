"""Finds datasets of the stack's own hub that were moved (renamed, or given to another owner) while
`pipeline.toml` still has their old names. Pushes to such a dataset start no jobs."""

from http import HTTPStatus

import httpx

from pipeline.settings import Settings
from pipeline.tokens import Tokens

_ROUTE = "/api/datasets/"


def moved_datasets(settings: Settings, tokens: Tokens) -> dict[str, str]:
    """The moved datasets that pipelines follow: old name (the name in the settings) → present name.
    Empty if the hub does not answer."""
    moved = {}
    for dataset in settings.datasets_on_hub:
        try:
            answer = httpx.get(
                f"{settings.hub_url}{_ROUTE}{dataset}",
                headers={"Authorization": f"Bearer {tokens.hub}"},
                timeout=5,
                trust_env=False,
            )
        except httpx.HTTPError:
            return {}
        if answer.status_code == HTTPStatus.TEMPORARY_REDIRECT:
            moved[dataset] = httpx.URL(answer.headers["Location"]).path.removeprefix(_ROUTE)
    return moved


def moved_message(dataset: str, present: str) -> str:
    return f"the dataset {dataset} was moved to {present}, so pushes to {present} start no jobs"


def moved_next_step(present: str) -> str:
    return (
        f'write dataset = "{present}" under [[pipelines]] in pipeline.toml, then: pipeline down && '
        "pipeline up --detach; then: pipeline jobs run"
    )
