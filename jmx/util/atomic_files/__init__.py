"""Atomic files and directories: they appear whole or not at all, and replace only earlier results of their kind."""

from jmx.util.atomic_files.paths import Kind, check_apart, check_new, named_errors
from jmx.util.atomic_files.writing import new_path, set_aside, write, write_json

__all__ = ["Kind", "check_apart", "check_new", "named_errors", "new_path", "set_aside", "write", "write_json"]
