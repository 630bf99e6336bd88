"""What an engine has done before its first request, and that a first token does not wait for those after it."""

from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
import text_checkpoints
from test_serving_engine import LIMITS, finish

from jmx.models import Sampler, from_source
from jmx.models.expected import expected
from jmx.models.forward import Weights
from jmx.models.loading import file_source
from jmx.models.programs import Program
from jmx.models.sources.protocol import Source
from jmx.serving.engine import Engine, Generate, begin_programs
from jmx.serving.engine.limits import Pools
from jmx.serving.engine.programs import Programs

pytestmark = pytest.mark.costly
COMPILED = "/jax/core/compile/backend_compile_duration"


class Warm(NamedTuple):
    """An engine whose programs were begun before its weights were there, and those that were compiled, each time."""

    engine: Engine
    source: Source
    compiled: list[Any]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    source = file_source(text_checkpoints.write(tmp_path_factory.mktemp("warm") / "tiny", "gpt_oss", layers=2))
    compiled, start = [], Program._start

    def started(self: Program, its: Any, *arguments: Any) -> Any:
        compiled.append((self, its))
        return start(self, its, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "_start", started)
        shapes = expected(source, dtype=jnp.float32, backend=None)
        assert shapes is not None
        programs = begin_programs(shapes, LIMITS, None)
        engine = Engine(from_source(source, dtype=jnp.float32), LIMITS, programs=programs)
        engine.warm_up()
    assert engine._programs is programs
    return Warm(engine, source, compiled)


@pytest.fixture
def engine(warm: Warm) -> Engine:
    return warm.engine


def test_each_program_is_compiled_once(warm: Warm) -> None:
    """A pass of each size, several passes, the counts of experts' tokens, and the choice of tokens at each level."""
    single, several = LIMITS.sizes(), LIMITS.decode_sizes()
    assert len(warm.compiled) == len({*warm.compiled}) == 2 * len(single) + len(several) + 3 * len(single)


def test_programs_of_another_model_are_not_used(warm: Warm) -> None:
    shapes = expected(warm.source, dtype=jnp.bfloat16, backend=None)
    assert shapes is not None
    programs = Programs(Weights.of(shapes), Pools.of(shapes), None, LIMITS.decode_steps, None)
    assert not programs.take(warm.engine._of_model)


def test_nothing_is_compiled_after_the_warm_up(engine: Engine, rng: np.random.Generator) -> None:
    """For requests of every level of sampling, alone and together, and with blocks beside rows."""
    assert engine.statistics.steps == 0
    assert [used for used, _ in engine.pages] == [0] * len(engine.pages)
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.jit(lambda x: x + len(compiled))(np.ones(3))  # the listener works
        assert compiled.pop()
        samplers = [Sampler(), Sampler(temperature=1.0), Sampler(temperature=0.7, top_p=0.5, frequency_penalty=0.1)]
        prompts = [tuple(rng.integers(256, size=40).tolist()) for _ in samplers]
        for number, sampler in enumerate(samplers):
            last = number == 2
            engine.submit(Generate(number, prompts[number], 9, sampler, logprobs=last, banned=(1,) * last))
            assert len(finish(engine)) == 9
        for number, sampler in enumerate(samplers):
            engine.submit(Generate(10 + number, prompts[number], 9, sampler))
        assert len(finish(engine)) == 27
        assert engine.statistics.load.sum() > 0
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_it_comes_before_all_requests(engine: Engine) -> None:
    engine.submit(Generate(100, (1, 2), 1))
    with pytest.raises(RuntimeError, match="before all requests"):
        engine.warm_up()
    finish(engine)
    with pytest.raises(RuntimeError, match="before all requests"):
        engine.warm_up()


def test_a_first_token_comes_before_those_after_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps are launched while the device computes the prompt, and are not waited for until it is read."""
    run_several, waited = Programs.run_several, []

    class Late:
        """Tokens that the device has not computed."""

        def __init__(self, tokens: jax.Array):
            self.tokens = tokens

        def copy_to_host_async(self) -> None:
            self.tokens.copy_to_host_async()

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            waited.append(self)
            return np.asarray(self.tokens)

    def late(self: Programs, *arguments: Any, **options: Any) -> Any:
        device, results, load = run_several(self, *arguments, **options)
        return device, results._replace(tokens=Late(results.tokens)), load

    monkeypatch.setattr(Programs, "run_several", late)
    engine.submit(Generate(200, (1, 2, 3), 10))
    assert engine.step() == []  # the prompt is launched
    (first,) = engine.step()  # four steps are launched, and the first token is read
    assert (first.id, first.finish_reason, waited) == (200, None, [])
    assert len(engine.step()) == 4
    assert len(waited) == 1
    finish(engine)
