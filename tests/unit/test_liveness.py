"""What a probe says about a service that answers by touching a file."""

import os
from pathlib import Path

from pipeline.stack.services import file_probe


def test_a_service_that_touches_its_file_works(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    probe = file_probe(file)
    assert probe(1) == "silent"  # there is no file yet
    file.touch()
    assert probe(1) == "works"
    for second in (1, 2):
        os.utime(file, (second, second))
        assert probe(1) == "works"
    assert probe(1) == "silent"
