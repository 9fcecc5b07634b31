"""Names the features of the Hugging Face Hub that this hub does not have. A client that asks for
such a feature gets an error with the feature's name.

The status of the error is 501. After 404, a client would report that a job, a file or a repository
is missing. After most other errors of a server, it would repeat the request.
"""

import re
from collections.abc import Mapping

from pipeline.hub.errors import NotSupported

_BELOW_API: Mapping[str, str] = {
    "buckets": "Buckets",
    "collections": "Collections",
    "daily_papers": "Papers",
    "datasets-tags-by-type": "Lists of all tags",
    "inference": "Inference",
    "inference-proxy": "Inference",
    "jobs": "Jobs that are started through the API (use `pipeline jobs run`)",
    "kernels": "Kernels",
    "models-tags-by-type": "Lists of all tags",
    "organizations": "Pages of organizations",
    "papers": "Papers",
    "posts": "Posts",
    "recent-activity": "Activity feeds",
    "resource-groups": "Resource groups",
    "scheduled-jobs": "Scheduled jobs",
    "tasks": "Inference",
    "trending": "Trends",
    "users": "Pages of users, their likes and their followers",
}
_OF_REPOSITORY: Mapping[str, str] = {
    "croissant": "The dataset viewer",
    "dev-mode": "The runtime of Spaces",
    "duplicate": "Duplicates of repositories",
    "hardware": "The runtime of Spaces",
    "jwt": "Tokens of a Space",
    "leaderboard": "Leaderboards",
    "lfs-files": "The list of all LFS files",
    "like": "Likes",
    "likers": "Likes",
    "logs": "The runtime of Spaces",
    "notebook": "Notebooks",
    "parquet": "The dataset viewer",
    "pause": "The runtime of Spaces",
    "resource-group": "Resource groups",
    "restart": "The runtime of Spaces",
    "runtime": "The runtime of Spaces",
    "safetensors-metadata": "Summaries of safetensors files",
    "scan": "Scans for malware",
    "sleeptime": "The runtime of Spaces",
    "storage": "The runtime of Spaces",
    "treesize": "Sizes of folders",
    "user-access-request": "Gated repositories",
    "volumes": "The runtime of Spaces",
}
UNSUPPORTED_VERBS = frozenset(_OF_REPOSITORY)
BESIDE_REPOSITORIES: Mapping[str, str] = {
    "/api/spaces/hardware": "The runtime of Spaces",
    "/api/spaces/semantic-search": "The search in Spaces by meaning",
    "/api/spaces/templates": "Templates of Spaces",
    "/api/spaces/zero-gpu/quota": "The runtime of Spaces",
}
"""Paths that look like the path of a Space, but name none."""
_ELSEWHERE: Mapping[str, str] = {
    "buckets": "Buckets",
    "collections": "Collections",
    "oauth": "Login through a browser (use `hf auth login --token` or HF_TOKEN)",
    "papers": "Papers",
    "uploads": "Uploads for discussions",
}
ASKED_WITHOUT_TOKEN = (
    "/api/datasets-tags-by-type",
    "/api/models-tags-by-type",
    "/api/papers/",
)
"""`get_dataset_tags`, `get_model_tags` and `paper_info` of `huggingface_hub` send no token."""
_REPOSITORY = re.compile(r"/api/(?:model|dataset|space)s/[^/]+/(.+)")


def refusal(method: str, path: str) -> NotSupported | None:
    """The error for a request whose path belongs to a feature that this hub does not have. None for
    any other path."""
    missing = _feature(path)
    if missing is None:
        return None
    return NotSupported(f"{missing}: not supported by this hub ({method} {path}).")


def _feature(path: str) -> str | None:
    if path in BESIDE_REPOSITORIES:
        return BESIDE_REPOSITORIES[path]
    if (below := _REPOSITORY.fullmatch(path)) is not None:
        # `below[1]` begins with the verb if the path has no owner. Otherwise it begins with the
        # repository's name, and the verb comes second.
        verbs = below[1].split("/")[:2]
        return next((_OF_REPOSITORY[verb] for verb in verbs if verb in _OF_REPOSITORY), None)
    first, _, rest = path.strip("/").partition("/")
    if first == "api":
        return _BELOW_API.get(rest.partition("/")[0])
    return _ELSEWHERE.get(first)
