"""A purge of a commit that a pull request has: refused while it is open, done when it has ended."""

import pytest

from tests.integration.test_hub_purge import SECRET, Place, place, pushed

__all__ = ["place", "pushed"]

ON = {"repo_id": "local/facts", "repo_type": "dataset"}


@pytest.mark.parametrize(("ending", "is_up"), [("closed", True), ("merged", False)])
def test_the_commit_of_a_pull_request_is_purged_when_it_has_ended(
    place: Place, ending: str, is_up: bool
) -> None:
    with place.hub() as hub:
        place.push_away(hub)
        place.purged(place.bad)
        opened = hub.api.upload_file(
            path_or_fileobj=SECRET.encode(), path_in_repo="more.txt", create_pr=True, **ON
        )
        sha = str(opened.oid)
        assert "refs/pr/1 of the dataset local/facts still leads to" in place.refused(sha)
        if ending == "closed":
            hub.api.change_discussion_status(discussion_num=1, new_status="closed", **ON)
        else:
            hub.api.merge_pull_request(discussion_num=1, **ON)
            merged = hub.api.dataset_info("local/facts").sha
            place.push_away(hub)
            assert merged is not None
            place.purged(merged)
        if is_up:
            place.purged(sha)
    if not is_up:
        place.purged(sha)
    assert place.holds_the_secret() == []
    assert not place.has(sha)
    with place.hub() as hub:
        shown = hub.api.get_discussion_details(discussion_num=1, **ON)
        assert (shown.status, shown.title) == (ending, "Upload more.txt with huggingface_hub")
        after = place.push(hub, "rows.jsonl", "after the purge")
        assert hub.api.dataset_info("local/facts").sha == after
