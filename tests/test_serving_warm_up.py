"""What an engine has done before its first request, and that a first token does not wait for those after it."""

from typing import Any

import jax
import jax.monitoring
import numpy as np
import pytest
from test_serving_engine import LIMITS, finish, model

from jmx.models import Sampler
from jmx.serving.engine import Engine, Generate
from jmx.serving.engine.programs import Programs

pytestmark = pytest.mark.costly
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def engine() -> Engine:
    its = Engine(model("gpt_oss"), LIMITS)
    its.warm_up()
    return its


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
