"""Limits of the lists and dicts in request bodies.

A body of 8 MiB can contain a list of half a million wrong items (`MAX_VALUES` in
`serving/http/bodies.py`). Without limits, pydantic would make an error for each item, which takes
minutes and gigabytes. So the validation of each list ends at its first wrong item (`fail_fast`),
and no list may be longer than its limit. A dict whose values may have any type needs no limit,
because none of its values is wrong.
"""

from pydantic import Field

from serving.http.bodies import MAX_VALUES

MAX_ITEMS = 2**14
MAX_TOKEN_IDS = MAX_VALUES

FewItems = Field(max_length=MAX_ITEMS, fail_fast=True)
