"""How many examples of a property are tested: fewer in a run with `--drawn`, whose profile conftest.py loads."""

import hypothesis

ALL = 100  # of hypothesis' own profile, in a run of all tests


def examples(count: int) -> hypothesis.settings:
    """Settings for `count` examples in a run of all tests, and proportionally fewer, at least two, in a drawn one."""
    here = hypothesis.settings().max_examples
    return hypothesis.settings(max_examples=max(min(count, 2), count * here // ALL))
