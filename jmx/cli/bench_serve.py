"""`jmx bench serve`: measures a running server."""

import argparse
import json
import os
import pathlib
from typing import Any

from jmx.cli.output import EXIT_OK, check_directories, print_json, show, to_stderr
from jmx.cli.parser import Parser, counts, number
from jmx.util import atomic_files

_KEY_VARIABLE = "JMX_API_KEY"


def add(command: Parser) -> None:
    """Adds the arguments of `jmx bench serve`."""
    command.add_argument(
        "url", metavar="URL", help="of a server, such as http://127.0.0.1:8000; its key is JMX_API_KEY"
    )
    command.add_argument(
        "--users", type=counts, metavar="N,...", help="requests at a time, one measurement each (default 1,8)"
    )
    command.add_argument("--rate", type=float, metavar="R", help="instead: requests a second, at random times")
    command.add_argument("--requests", type=number, metavar="N", help="of each measurement (default: 3 a user, or 64)")
    command.add_argument("--input", type=number, default=1024, metavar="N", help="tokens of a prompt (default 1024)")
    command.add_argument("--output", type=number, default=1024, metavar="N", help="tokens of an answer (default 1024)")
    command.add_argument("--seed", type=number, default=0, metavar="S", help="of prompts and times (default 0)")
    command.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="save JSON to a new FILE, or print it without FILE",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs `jmx bench serve`."""
    from jmx.serving import load

    kept = None if arguments.json in (None, "-") else pathlib.Path(arguments.json)
    if kept is not None:
        atomic_files.check_new(kept)
        check_directories(str(kept))
    if arguments.rate is not None and arguments.users is not None:
        raise ValueError("`--rate` must be given without --users")
    if arguments.seed < 0:
        raise ValueError(f"`--seed` (={arguments.seed}) must be at least 0")
    target = load.Target(
        arguments.url, arguments.input, arguments.output, os.environ.get(_KEY_VARIABLE), arguments.seed
    )
    points = []
    if arguments.rate is not None:
        points.append(load.measure_rate(target, rate=arguments.rate, requests=_or(arguments.requests, 64)))
    else:
        for users in arguments.users or [1, 8]:
            points.append(load.measure(target, users=users, requests=_or(arguments.requests, 3 * users)))
            to_stderr(f"{users} users: {points[-1].tok_s:.0f} tokens/s")
    rows = [point.as_dict() for point in points]
    if arguments.json == "-":
        print_json(rows)
        return EXIT_OK
    show(_table(rows))
    if kept is not None:
        with atomic_files.new_path(kept) as new:
            new.write_text(json.dumps(rows, indent=1) + "\n")
    return EXIT_OK


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    of_time = ("TTFT ms p50", "p99", "ITL ms p50", "p99", "TPOT ms p50")
    table = Table("users", "requests/s", "input", "output", "tokens/s", *of_time)
    for row in rows:
        times = (f"{row[name][share]:.1f}" for name in ("ttft_ms", "itl_ms") for share in ("p50", "p99"))
        of_load = ("" if row[name] is None else str(row[name]) for name in ("users", "rate"))
        tpot = f"{row['tpot_ms']['p50']:.2f}"
        table.add_row(*of_load, str(row["input"]), str(row["output"]), f"{row['tok_s']:.1f}", *times, tpot)
    return table
