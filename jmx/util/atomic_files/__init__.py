"""Files and directories that appear whole, or not at all, and in the place of nothing but an earlier result of jmx."""

from jmx.util.atomic_files.paths import Kind, check_apart, check_new, named_errors
from jmx.util.atomic_files.writing import new_path, set_aside, write, write_json

__all__ = ["Kind", "check_apart", "check_new", "named_errors", "new_path", "set_aside", "write", "write_json"]
