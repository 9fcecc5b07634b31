"""Each promise of the README has tests that `make test` runs: this is the list of them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISES = {
    "No acknowledged push is lost.": [
        "integration/test_launch_job.py::test_a_delivery_that_is_repeated_after_a_kill_has_one_job",
        "integration/test_webhooks_under_fire.py"
        "::test_each_push_has_its_effect_once_whoever_is_killed",
        "integration/test_job_kills.py::test_every_delivery_reaches_an_outcome",
    ],
    "A burst of pushes makes one job.": [
        "unit/job_store/test_submissions.py::test_a_burst_from_many_threads_is_one_pending_job",
        "unit/job_store/test_submissions.py::test_a_pending_job_absorbs_the_newer_commit",
    ],
    "What you push is what the model answers.": [
        "integration/test_retrain_learned.py"
        "::test_every_pushed_row_is_learned_and_none_is_held_out",
        "integration/test_retrain_learned.py"
        "::test_one_edited_row_is_learned_and_the_others_are_kept",
        "integration/test_retrain_learned.py"
        "::test_what_was_not_learned_is_refused_by_name_and_the_next_commit_goes_on",
    ],
    "No worse model is served.": [
        "integration/test_retrain_learned.py::test_shuffled_completions_are_refused",
        "integration/test_retrain_learned.py::test_deleting_nine_rows_of_ten_is_refused",
    ],
    "A release is complete, or it is not there.": [
        "integration/test_publish_survives_sigkill.py::test_a_killed_publisher_leaves_nothing_half",
        "contract/engine_conformance.py::test_a_bad_release_leaves_the_old_one",
        "integration/test_swap_at_start.py"
        "::test_a_server_whose_release_is_damaged_starts_on_the_one_before_it_and_says_so",
    ],
    "A swap is checked.": [
        "integration/test_swap_refusals.py::test_a_probe_that_does_not_match_is_refused",
        "property/test_swaps_keep_their_promise.py::test_the_last_live_swap_answers",
    ],
    "Each answer comes from one release": [
        "contract/engine_conformance.py::test_swaps_under_load_never_lie",
        "contract/engine_conformance.py::test_a_stream_ends_on_the_release_that_it_began_on",
    ],
    "Going back is a swap": [
        "integration/test_releases_command.py"
        "::test_without_a_server_the_way_back_from_a_damaged_release_is_left_pending",
        "e2e/test_loop.py::test_rollback_and_swap_choose_what_is_served",
    ],
}
NOT_IN_MAKE_TEST = re.search(r"-m \"not \((.*?)\)\"", (ROOT / "Makefile").read_text())


def test_the_list_is_that_of_the_readme() -> None:
    told = re.search(r"promises;.*?\n\n(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert told is not None
    assert re.findall(r"^- \*\*(.*?)\*\*", told[1], re.MULTILINE) == list(PROMISES)


@pytest.mark.parametrize("test", [test for tests in PROMISES.values() for test in tests])
def test_it_is_run_by_make_test(test: str) -> None:
    file, name = test.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    (found,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    )
    assert NOT_IN_MAKE_TEST is not None
    marks = {ast.unparse(mark) for mark in found.decorator_list}
    marks |= {
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    }
    for mark in NOT_IN_MAKE_TEST[1].split(" or "):
        assert not any(f"mark.{mark}" in each for each in marks)
