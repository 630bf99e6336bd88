"""The environment variables of processes that tests start."""

import os
from pathlib import Path


def importing(*folders: Path, **others: str) -> dict[str, str]:
    """This process's variables and `others`, with which Python imports from `folders` before all that it did here."""
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | others | {"PYTHONPATH": os.pathsep.join(path)}
