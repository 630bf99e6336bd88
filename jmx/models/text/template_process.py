"""A process of its own for a chat template, with limits of memory and time: the template may be anyone's.

The process runs this file, and imports nothing of jmx.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

# Instructions of a template: a conversation of 1000 messages takes some 100,000, and 10 million run in seconds.
FUEL = 10_000_000
# A prompt of a million tokens is some 5 MB.
MEMORY = 1 << 30  # bytes of address space
SECONDS = 10.0


def render(source: str, contexts: Sequence[Mapping[str, Any]], now: datetime) -> list[str | ValueError]:
    """The texts that a template makes of values of JSON, in one process, which takes longer to start than a text.

    Args:
        source: the template.
        contexts: its variables, for each text.
        now: the time that it reads.

    Returns:
        For each context a text, or a ValueError, of one line, if the template is wrong, rejects its variables or needs
        more than `FUEL`.

    Raises:
        ValueError: all need more than there is: `MEMORY`, `SECONDS`. The message is one line.
        ImportError: minijinja is not installed.
    """
    import minijinja

    packages = str(Path(minijinja.__file__).parents[1])
    asked = json.dumps({"packages": packages, "source": source, "contexts": contexts, "now": now.isoformat()})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            input=asked.encode(),
            capture_output=True,
            timeout=SECONDS,
            start_new_session=True,  # Ctrl-C is for the caller
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it must end within {SECONDS:.0f} s") from None
    if done.returncode:  # an allocation that fails ends the process
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"it must do with {MEMORY >> 20} MiB of memory ({last})")
    return [its["text"] if "text" in its else ValueError(its["error"]) for its in json.loads(done.stdout)]


def _main() -> None:
    """Reads what `render` asks for on stdin, and writes the answer on stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.loads(sys.stdin.buffer.read())
    sys.path.append(asked["packages"])
    environment = _environment(datetime.fromisoformat(asked["now"]))
    sys.stdout.write(json.dumps([_rendered(environment, asked["source"], its) for its in asked["contexts"]]))


def _rendered(environment: Any, source: str, context: Mapping[str, Any]) -> dict[str, str]:
    """The text of one context, or why there is none."""
    from minijinja import TemplateError

    try:
        return {"text": environment.render_str(source, None, **context)}
    except (TemplateError, ValueError, TypeError) as error:  # the others: of values that a template gives to a filter
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}


def _environment(now: datetime) -> Any:
    """Jinja as transformers sets it up."""
    from minijinja import Environment, TemplateError

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return now.strftime(form)

    return Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        fuel=FUEL,
        debug=False,
        auto_escape_callback=lambda _: False,
        filters={"tojson": _tojson},
        tests={"sequence": lambda value: isinstance(value, str | Sequence | Mapping)},  # of minijinja, texts are none
        globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read: unlike Jinja's own filter, it escapes nothing for HTML."""
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


if __name__ == "__main__":
    _main()
