"""Uploads of the unmodified client to a pull request, each with and without `hf_xet`."""

import pytest
from huggingface_hub import CommitOperationAdd, constants
from huggingface_hub.errors import RevisionNotFoundError

from tests.uploads_fixtures import LARGE, Repo, files, hub, repo

__all__ = ["hub", "repo"]

# What the client itself does when it sends a file without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def test_large_files_of_a_pull_request(repo: Repo) -> None:
    head = repo.head
    folder = files(repo.scratch / "in", a_txt=b"a", sub__b_bin=LARGE)
    made = repo.api.upload_folder(folder_path=folder, create_pr=True, **repo.on)
    assert made.pr_num == 1 and made.pr_revision == "refs/pr/1"
    more = LARGE + b"more"
    repo.api.upload_file(
        path_or_fileobj=more, path_in_repo="c.bin", revision=made.pr_revision, **repo.on
    )
    assert (repo.head, repo.paths()) == (head, set())
    assert repo.large("refs/pr/1") == {"sub/b.bin", "c.bin"}
    assert repo.read("sub/b.bin", "refs/pr/1") == LARGE
    assert repo.read("c.bin", "refs/pr/1") == more
    if not constants.HF_HUB_DISABLE_XET:  # then the client opens a draft
        repo.api.change_discussion_status(discussion_num=1, new_status="open", **repo.on)
    repo.api.merge_pull_request(discussion_num=1, **repo.on)
    assert repo.paths() == {"a.txt", "sub/b.bin", "c.bin"}
    assert (repo.read("sub/b.bin"), repo.read("c.bin")) == (LARGE, more)


def test_a_pull_request_for_another_branch(repo: Repo) -> None:
    head = repo.head
    repo.api.create_branch(branch="side", **repo.on)

    def ask(revision: str) -> int | None:
        return repo.api.create_commit(
            operations=[
                CommitOperationAdd("a.txt", revision.encode()),
                CommitOperationAdd("b.bin", LARGE),
            ],
            commit_message="Add",
            revision=revision,
            create_pr=True,
            **repo.on,
        ).pr_num

    repo.api.create_tag(tag="v1", **repo.on)
    for revision in ("none", head, "v1"):
        with pytest.raises(RevisionNotFoundError):
            ask(revision)
    assert not list(repo.api.get_repo_discussions(**repo.on))
    assert ask("side") == 1
    with pytest.raises(RevisionNotFoundError):
        ask("refs/pr/1")
    details = repo.api.get_discussion_details(discussion_num=1, **repo.on)
    assert details.target_branch == "refs/heads/side"
    repo.api.merge_pull_request(discussion_num=1, **repo.on)
    assert (repo.paths(), repo.paths("side")) == (set(), {"a.txt", "b.bin"})
    assert repo.read("b.bin", "side") == LARGE


@pytest.mark.slow
def test_hf_opens_and_merges_a_pull_request(repo: Repo) -> None:
    folder = files(repo.scratch / "in", a_txt=b"a", sub__b_bin=LARGE)
    dataset = ("--repo-type", "dataset")
    repo.hf("upload", repo.id, str(folder), ".", "--create-pr", *dataset)
    assert repo.paths() == set()
    assert "+a" in repo.hf("discussions", "diff", repo.id, "1", *dataset)
    if not constants.HF_HUB_DISABLE_XET:  # then the client opens a draft
        repo.hf("discussions", "reopen", repo.id, "1", "--yes", *dataset)
    repo.hf("discussions", "merge", repo.id, "1", "--yes", *dataset)
    assert repo.paths() == {"a.txt", "sub/b.bin"}
    assert repo.read("sub/b.bin") == LARGE
