"""The torch engine behind our server, for `bench_serving`: folder, port, admin token."""

import sys
from pathlib import Path

from serving.app import create_app
from serving.engines.torch_engine.engine import create_engine
from serving.server import serve
from serving.settings import ServingSettings

if __name__ == "__main__":
    folder, port, admin_token = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    settings = ServingSettings(port=port)
    app = create_app(
        engine=create_engine(dtype=settings.dtype),
        settings=settings,
        releases_dir=folder.parent,
        pipeline="answers",
        admin_token=admin_token,
        folder=folder,
    )
    serve(app, settings)
