"""What `jmx serve` runs: checks of everything that needs no weights, then the server, and the engine in its process."""

import argparse
import asyncio
import functools
import ipaddress
import math
import os
import socket
from pathlib import Path
from typing import Any

from jmx.cli import compilation_cache, mesh_argument, model_arguments, random_model
from jmx.cli.checks import check_known
from jmx.cli.output import EXIT_OK, to_stderr
from jmx.cli.parser import MOST
from jmx.models import Model
from jmx.models.sampling import check_seed
from jmx.models.sources.popularity import ROUTINGS
from jmx.models.sources.protocol import Source
from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.stream import read_tokenizer
from jmx.serving.engine import Engine, Guides, Limits, automatic_cache_tokens, begin_programs

_LONGEST = 8192  # of requests, unless --max-length asks for more
_KEY_VARIABLE = "JMX_API_KEY"


class IdTokenizer:
    """The texts of random weights: token ids. It has no tokens for texts."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """ValueError: there are none."""
        raise ValueError("a model with random weights takes prompts of token ids")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The ids, with a space before each."""
        return "".join(f" {id}" for id in ids)

    def get_vocab(self) -> dict[str, int]:
        """None."""
        return {}

    def token_to_id(self, token: str) -> int | None:
        """None: it has no names of tokens."""
        return None


def check(arguments: argparse.Namespace) -> None:
    """ValueError for options that are wrong by themselves. Nothing is read."""
    random_model.check(arguments)
    if arguments.routing is not None:
        if arguments.random is None:
            raise ValueError(f"`--routing` (={arguments.routing!r}) needs --random: a checkpoint has its own")
        check_known("--routing", arguments.routing, ROUTINGS)
    # The devices of a mesh are the engine's: this process takes none of their memory.
    model_arguments.check(argparse.Namespace(**vars(arguments) | {"mesh": None, "mesh_axes": None}))
    if not 0 <= arguments.port < 1 << 16:
        raise ValueError(f"`--port` (={arguments.port}) must be in 0..{(1 << 16) - 1}")
    if arguments.max_waiting < 0:
        raise ValueError(f"`--max-waiting` (={arguments.max_waiting}) must be at least 0")
    if arguments.drain_seconds < 0:
        raise ValueError(f"`--drain-seconds` (={arguments.drain_seconds}) must be at least 0")
    if arguments.name is not None and not (arguments.name and arguments.name.isprintable()):
        raise ValueError(f"`--name` (={arguments.name!r}) must be at least one character, all of them printable")
    check_seed("--seed", arguments.seed)
    limits_of(arguments, _or(arguments.max_length, 2))  # by default that of a model, which is not read yet


def _groups(arguments: argparse.Namespace) -> int:
    """The groups of devices into which --mesh divides requests. ValueError if --mesh or --mesh-axes is wrong."""
    divided = model_arguments.axes(arguments)
    if divided is None:
        return 1
    sizes = mesh_argument.sizes(arguments.mesh)
    return math.prod(sizes[name] for name in divided["token"])


def _or(number: int | None, default: int) -> int:
    return default if number is None else number


def limits_of(arguments: argparse.Namespace, max_length: int, cache_tokens: int = MOST) -> Limits:
    """The engine's limits. `cache_tokens` counts if the arguments have none."""
    groups = _groups(arguments)
    try:
        limits = Limits(
            max_users=arguments.max_users,
            max_length=max_length,
            cache_tokens=_or(arguments.cache_tokens, cache_tokens),
            page=arguments.page,
            prompt_tokens=_or(arguments.prompt_tokens, groups * Limits.prompt_tokens),
            decode_steps=arguments.decode_steps,
            reuse=not arguments.no_prefix_reuse,
        )
        limits.of_group(groups)
        return limits
    except ValueError as error:
        flags = {name: f"--{name.replace('_', '-')}" for name in Limits.__dataclass_fields__}
        message = str(error)
        for name, flag in flags.items():
            message = message.replace(f"`{name}`", f"`{flag}`")
        raise ValueError(message) from error


def read_keys(file: Path | None, environment: str | None) -> tuple[str, ...]:
    """The keys of the API: of a file, one a line, and of the environment.

    Raises:
        ValueError: a file that others may read, or a key that is empty, short or not of printable ASCII.
    """
    keys = [] if environment is None else [environment]
    if file is not None:
        if os.name == "posix" and file.stat().st_mode & 0o077:
            raise ValueError(f"`--api-key-file` (={file}) must be readable by its owner only: chmod 600 {file}")
        keys += file.read_text(encoding="utf-8").splitlines()
        if not keys:
            raise ValueError(f"`--api-key-file` (={file}) must have a key")
    for key in keys:
        if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError("a key of the API must have at least 16 characters of printable ASCII, and no space")
    return tuple(keys)


def check_address(host: str, keys: tuple[str, ...]) -> None:
    """ValueError for an address that other machines reach, without a key."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, flags=socket.AI_PASSIVE)}
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`--host` (={host!r}) is not an address of this machine: {error}") from error
    if not keys and not all(ipaddress.ip_address(str(its).partition("%")[0]).is_loopback for its in found):
        raise ValueError(
            f"`--host` (={host}) is reached by other machines, which needs a key: --api-key-file, or {_KEY_VARIABLE} "
            "in the environment"
        )


def make_engine(arguments: argparse.Namespace, max_length: int) -> Engine:
    """The engine, in its process: checks that devices reach each other, and memory, and reads the weights."""
    import jax

    from jmx.models import from_source
    from jmx.models.communication import check_communication
    from jmx.models.expected import expected

    compilation_cache.use(arguments)
    source, split = _source(arguments), model_arguments.split(arguments)
    if split is not None:
        check_communication(split)
    adapters = model_arguments.adapters(arguments, source)
    limits = limits_of(arguments, max_length)
    if arguments.cache_tokens is None:
        tokens = automatic_cache_tokens(source, limits, arguments.dtype, split, adapters)
        limits = limits_of(arguments, max_length, tokens)
    store, dtype, programs = compilation_cache.program_store(), jax.numpy.dtype(arguments.dtype), None
    if split is None and adapters is None and (shapes := expected(source, dtype=dtype, backend=arguments.backend)):
        programs = begin_programs(shapes, limits, store)
    with source.progress(True):
        model = from_source(source, dtype=dtype, backend=arguments.backend, split=split, adapters=adapters)
    return Engine(model, limits, store=store, guides=_guides(arguments, model), programs=programs)


def _guides(arguments: argparse.Namespace, model: Model) -> Guides | None:
    """What makes answers fit a schema; None for random weights, or without the llguidance package."""
    if arguments.random is not None:
        return None
    tokenizer = read_tokenizer(model_arguments.find(arguments.model))
    try:
        return Guides(tokenizer, model.config.vocab_size, model.config.eos_token_ids)
    except ImportError:
        return None


def _source(arguments: argparse.Namespace) -> Source:
    if arguments.random is None:
        return model_arguments.source(arguments, model_arguments.find(arguments.model))
    return random_model.source(arguments, arguments.routing or "uniform")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    try:
        from jmx.serving import server
    except ImportError as error:
        raise ImportError(f"a server needs more packages ({error}): pip install 'jmx-moe[serve,hf]'") from error
    check(arguments)
    keys = read_keys(arguments.api_key_file, os.environ.get(_KEY_VARIABLE))
    check_address(arguments.host, keys)
    make_service = _service_maker(arguments, keys)
    with server.listen(arguments.host, arguments.port) as listening:
        host, port = listening.getsockname()[:2]
        to_stderr(f"jmx: http://{f'[{host}]' if ':' in host else host}:{port}/ answers when the engine is ready")
        code = asyncio.run(server.serve(make_service, listening, _log, arguments.drain_seconds))
    return EXIT_OK if code == 0 else code


def _log(line: str) -> None:
    to_stderr(f"jmx: {line}")


def _service_maker(arguments: argparse.Namespace, keys: tuple[str, ...]) -> Any:
    """Reads what a server has of a model besides its weights, and returns a function that makes its service."""
    from jmx.serving.api.service import LOCAL_NAMES, Service
    from jmx.serving.client import EngineClient

    if arguments.random is not None:
        config, tokenizer, template, context = random_model.config(arguments), IdTokenizer(), None, None
    else:
        directory = model_arguments.find(arguments.model)
        tokenizer, source = read_tokenizer(directory), _source(arguments)
        model_arguments.adapters(arguments, source)  # errors of its files come before the engine is started
        config = source.config
        context = model_arguments.context_length(directory)
        try:
            template = ChatTemplate.read(directory)
        except FileNotFoundError as error:
            template = None
            to_stderr(f"jmx: warning: /v1/chat/completions is not served: {error}")
    if arguments.max_length is not None and context is not None and arguments.max_length > context:
        raise ValueError(f"`--max-length` (={arguments.max_length}) must be at most {context}, the model's context")
    max_length = _or(arguments.max_length, min(_or(context, _LONGEST), _LONGEST))
    limits_of(arguments, max_length)
    name = arguments.name or arguments.random or _name(arguments.model)

    def make_service() -> Service:
        client = EngineClient(functools.partial(make_engine, arguments, max_length), max_length, _log)
        return Service(
            client,
            name,
            tokenizer,
            template,
            frozenset(config.eos_token_ids),
            config.vocab_size,
            arguments.max_users + arguments.max_waiting,
            keys,
            LOCAL_NAMES | {arguments.host.lower()},
        )

    return make_service


def _name(model: str) -> str:
    """A model's name in requests: that on the Hub, or its directory's."""
    return Path(model).resolve().name if Path(model).is_dir() else model.partition("@")[0]
