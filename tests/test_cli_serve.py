"""`jmx serve`: what is wrong with its arguments is an error before any weight is read."""

import argparse
import pathlib

import pytest
import text_checkpoints

from jmx import cli
from jmx.cli import serving
from jmx.models import loading

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return text_checkpoints.write(tmp_path_factory.mktemp("serve") / "tiny", "gpt_oss")


@pytest.fixture(autouse=True)
def _reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JMX_API_KEY", raising=False)
    monkeypatch.setattr(loading, "from_source", lambda *_, **__: pytest.fail("weights were read"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--random", "gpt-oss-20b"], "give either MODEL or --random"),
        (["--port", "70000"], "`--port` (=70000) must be in 0..65535"),
        (["--max-users", "0"], "`--max-users` (=0) must be at least 1"),
        (["--page", "0"], "`--page` (=0) must be at least 1"),
        (["--max-waiting", "-1"], "`--max-waiting` (=-1) must be at least 0"),
        (["--drain-seconds", "-1"], "`--drain-seconds` (=-1)"),
        (["--cache-tokens", "100"], "`--cache-tokens` (=100) must be at least `--max-length` (="),
        (["--max-length", "5000"], "`--max-length` (=5000) must be at most 1024, the model's context"),
        (["--mesh", "ep"], "`--mesh` (='ep') must be axes as NAME=SIZE"),
        (["--mesh", "zz=2"], "must have axes that divide something, and ['zz'] do not"),
        (["--mesh", "ep=2", "--mesh-axes", "kv=ep"], "`axes` (={'kv': ('ep',)}) must have keys among"),
        (["--mesh", "ep=2", "--mesh-axes", "heads=tp"], "`axes['heads']` (='tp') must be an axis of the mesh"),
        (["--mesh", "ep=2,dp=3"], "`--max-users` (=64) must be a multiple of 3, the groups of devices"),
        (
            ["--mesh", "ep=3", "--mesh-axes", "token=ep,expert=none,heads=none"],
            "`--max-users` (=64) must be a multiple",
        ),
        (
            ["--mesh", "dp=2", "--cache-tokens", "2000"],
            "`--cache-tokens` (=2000) must be at least 2048: `--max-length`",
        ),
        (["--routing", "zipf"], "`--routing` (='zipf') needs --random"),
        (["--mesh-axes", "heads=none"], "`--mesh-axes` (='heads=none') needs --mesh"),
        (["--backend", "none"], "`--backend` (='none') must be one of"),
        (["--host", "0.0.0.0"], "`--host` (=0.0.0.0) is reached by other machines, which needs a key"),
        (["--host", "no host"], "is not an address of this machine"),
        (["--api-key-file", "/does/not/exist"], "/does/not/exist"),
        (["--name", ""], "`--name`"),
    ],
)
def test_wrong_arguments(checkpoint: pathlib.Path, flags: list[str], message: str, capsys) -> None:
    assert cli.main(["serve", str(checkpoint), "--no-compilation-cache", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_routing_is_one_of_those_there_are(capsys) -> None:
    flags = ["--random", "gpt-oss-20b", "--routing", "half", "--no-compilation-cache"]
    assert cli.main(["serve", *flags]) == 2
    assert "`--routing` (='half') must be one of uniform, zipf" in capsys.readouterr().err


def test_a_port_in_use(checkpoint: pathlib.Path, capsys) -> None:
    from jmx.serving import server

    with server.listen("127.0.0.1", 0) as listening:
        port = str(listening.getsockname()[1])
        # Another socket listens there.
        assert cli.main(["serve", str(checkpoint), "--no-compilation-cache", "--port", port]) == 2
    assert "cannot be used: Address already in use" in capsys.readouterr().err


def test_keys(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one-key-of-16-characters\nanother-key-of-this-length\n")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        serving.read_keys(file, None)
    file.chmod(0o600)
    found = ("a-third-key-from-outside", "one-key-of-16-characters", "another-key-of-this-length")
    assert serving.read_keys(file, found[0]) == found
    for wrong in ("", "short", "a key with spaces in it", "a-key-that-is-not-äscii"):
        with pytest.raises(ValueError, match="at least 16 characters"):
            serving.read_keys(None, wrong)
    file.write_text("")
    with pytest.raises(ValueError, match="must have a key"):
        serving.read_keys(file, None)


def test_random_weights_have_no_texts() -> None:
    tokenizer = serving.IdTokenizer()
    assert tokenizer.decode([3, 4]) == " 3 4"
    assert tokenizer.token_to_id("<s>") is None
    with pytest.raises(ValueError, match="token ids"):
        tokenizer.encode("text")


@pytest.mark.parametrize(
    ("mesh", "axes", "given", "found"),
    [
        (None, None, None, 1024),
        ("ep=4", None, None, 1024),
        ("dp=2,ep=2", None, None, 2048),
        ("ep=4", "token=ep,heads=none", None, 4096),
        ("dp=2", None, 512, 512),
    ],
)
def test_each_group_of_devices_has_tokens_of_prompts_by_default(
    mesh: str | None, axes: str | None, given: int | None, found: int
) -> None:
    limits = {"max_users": 64, "cache_tokens": None, "page": 128, "prompt_tokens": given, "decode_steps": 4}
    arguments = argparse.Namespace(**limits, no_prefix_reuse=False, mesh=mesh, mesh_axes=axes)
    assert serving.limits_of(arguments, 256).prompt_tokens == found
