"""The command `jmx`, as it is installed: outside the package, whose import takes a second or two.

Until the command runs, Ctrl-C ends the process at once, as it would end any program, and not with a traceback.
"""

import signal


def main() -> int:
    """Runs `jmx.cli.main`."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:  # it is ignored in a background process of a shell, for example
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from jmx import cli

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()
