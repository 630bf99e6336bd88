"""`jmx doctor`: prints versions, devices, and what each backend lacks here."""

import argparse

from jmx.cli.common import EXIT_NO, EXIT_OK, Parser, add_json, print_json, show


def add(command: Parser) -> None:
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from jmx.perf import doctor

    findings = doctor.examine()
    if arguments.json:
        print_json(findings)
    else:
        show(*doctor.tables(findings))
        for line in findings["advice"]:
            print(line)
    return EXIT_OK if findings["healthy"] else EXIT_NO
