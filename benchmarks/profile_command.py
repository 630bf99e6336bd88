"""The command line of a profile: `capture` measures and writes a new file of JSON, `draw` makes a picture of one."""

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

from jmx.util import atomic_files

Profile = dict[str, Any]


def run(
    description: str,
    subject: str,
    capture: Callable[[argparse.Namespace], Profile],
    draw: Callable[[Profile, argparse.Namespace], None],
    *,
    capture_options: Callable[[argparse.ArgumentParser], Any],
    draw_options: Callable[[argparse.ArgumentParser], Any] = lambda command: None,
) -> int:
    """Runs the command that the process's arguments name.

    Args:
        description: of the program.
        subject: what is profiled.
        capture: arguments -> the profile that is saved.
        draw: writes a profile's picture, whose file is the argument `picture`.
        capture_options, draw_options: add what these take of arguments to their parsers.

    Raises:
        FileExistsError: before anything is measured, if there is a file for the new profile.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def save(arguments: argparse.Namespace) -> None:
        atomic_files.check_new(arguments.profile)
        profile = capture(arguments)
        atomic_files.write(arguments.profile, (json.dumps(profile) + "\n").encode())

    command = commands.add_parser("capture", help=f"profile {subject} on this machine's GPU")
    command.add_argument("profile", type=pathlib.Path, help="JSON to write")
    capture_options(command)
    command.set_defaults(run=save)
    command = commands.add_parser("draw", help="draw a profile")
    command.add_argument("profile", type=pathlib.Path, help="JSON that `capture` wrote")
    command.add_argument("picture", help="file to write: .svg or .png")
    draw_options(command)
    command.set_defaults(run=lambda arguments: draw(json.loads(arguments.profile.read_text()), arguments))
    arguments = parser.parse_args()
    arguments.run(arguments)
    return 0
