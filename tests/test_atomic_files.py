"""Files and directories that appear whole, or not at all."""

import errno
import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import light_process
import pytest

import jmx
from jmx.util import atomic_files
from jmx.util.atomic_files import Kind, parts, renaming

ROOT = Path(jmx.__file__).parents[1]


def _fault(path: Path) -> str | None:
    """Of files and directories (by the file in them) that begin with "ours"."""
    file = path / "file" if path.is_dir() else path
    return None if file.read_text().startswith("ours") else "it begins otherwise"


KINDS = {is_directory: Kind("one of ours", _fault, is_directory) for is_directory in (False, True)}


def make(path: Path, is_directory: bool, text: str) -> None:
    if is_directory:
        path.mkdir()
        path /= "file"
    path.write_text(text)


def read(path: Path) -> str:
    return (path / "file" if path.is_dir() else path).read_text()


@pytest.fixture(params=["renameat2", "claim"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How names are changed: by the system call, and as where there is none."""
    if request.param == "claim":
        monkeypatch.setattr(renaming, "_system_call", lambda: None)
    elif renaming._system_call() is None:
        pytest.skip("this platform has no renameat2")
    return request.param


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_fails_leaves_nothing_behind(tmp_path, error):
    def fill() -> None:
        with atomic_files.new_path(tmp_path / "new") as path:
            path.mkdir()
            (path / "half").write_text("written")
            assert not (tmp_path / "new").exists()
            raise error

    with pytest.raises(error):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_what_succeeds_appears_whole_with_ordinary_permissions(tmp_path):
    (tmp_path / "plain").mkdir()
    with atomic_files.new_path(tmp_path / "new") as path:
        path.mkdir()
        (path / "file").write_text("written")
    assert (tmp_path / "new" / "file").read_text() == "written"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "plain"]
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_named(name: str, tmp_path: Path) -> None:
    for check in (atomic_files.check_new, lambda path: atomic_files.check_apart(dst=path, src=tmp_path)):
        with pytest.raises(ValueError, match=r"'.*/(a\\x00b|\\ud800)' must be a name that a file can have"):
            check(tmp_path / name)


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "dangling", "."):
        with pytest.raises(FileExistsError, match="must not exist yet"), atomic_files.new_path(tmp_path / name):
            pytest.fail("entered")
    with (
        pytest.raises(FileNotFoundError, match="must be in a directory"),
        atomic_files.new_path(tmp_path / "no" / "new"),
    ):
        pytest.fail("entered")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("is_directory", [False, True])
def test_an_earlier_one_is_replaced_and_nothing_else(way: str, is_directory: bool, tmp_path: Path) -> None:
    kind, path = KINDS[is_directory], tmp_path / "it"
    for text in ("ours 1", "ours 2", "theirs"):
        with atomic_files.new_path(path, kind, overwrite=True) as new:
            make(new, is_directory, text)
        assert read(path) == text
    with (
        pytest.raises(FileExistsError, match="must be one of ours, to be replaced, but it begins otherwise"),
        atomic_files.new_path(path, kind, overwrite=True),
    ):
        pytest.fail("entered")
    with (
        pytest.raises(FileExistsError, match=rf"it is a {'directory' if is_directory else 'regular file'}"),
        atomic_files.new_path(path, KINDS[not is_directory], overwrite=True),
    ):
        pytest.fail("entered")
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]
    assert read(path) == "theirs"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("theirs", ["file", "empty directory", "full directory", "link", "dangling link"])
@pytest.mark.parametrize("is_directory", [False, True])
def test_what_appears_meanwhile_stays(
    way: str, is_directory: bool, theirs: str, overwrite: bool, tmp_path: Path
) -> None:
    path = tmp_path / "it"

    def appear() -> None:
        if theirs == "file":
            path.write_text("ours, of another process")
        elif "link" in theirs:
            path.symlink_to(tmp_path if theirs == "link" else tmp_path / "nowhere")
        else:
            path.mkdir()
            if theirs == "full directory":
                (path / "file").write_text("ours, of another process")

    seen = []

    def write() -> None:
        with atomic_files.new_path(path, KINDS[is_directory], overwrite=overwrite) as new:
            make(new, is_directory, "ours")
            appear()
            seen.append(path.lstat())

    with pytest.raises(FileExistsError, match="it must "):
        write()
    assert os.path.samestat(path.lstat(), seen[0])
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("change", ["edited", "another", "gone"])
@pytest.mark.parametrize("is_directory", [False, True])
def test_what_was_there_must_be_there_still(way: str, is_directory: bool, change: str, tmp_path: Path) -> None:
    path, kind = tmp_path / "it", KINDS[is_directory]
    make(path, is_directory, "ours")

    def write() -> None:
        with atomic_files.new_path(path, kind, overwrite=True) as new:
            make(new, is_directory, "ours, new")
            if change == "edited":
                (path / "file" if is_directory else path).write_text("theirs")
            else:
                path.rename(tmp_path / "elsewhere")
            if change == "another":
                make(path, is_directory, "ours, too")

    if change == "gone":
        write()
    else:
        with pytest.raises(FileExistsError, match="it must "):
            write()
    expected = {"edited": "theirs", "another": "ours, too", "gone": "ours, new"}
    assert read(path) == expected[change]
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("is_directory", [False, True])
def test_what_is_no_longer_ours_when_it_is_out_of_the_way_comes_back(
    way: str, is_directory: bool, tmp_path: Path
) -> None:
    """The last instant: it is checked again when its name no longer leads to it."""
    path, looks = tmp_path / "it", []
    make(path, is_directory, "ours")
    before = path.lstat()

    def fault(place: Path) -> str | None:
        looks.append(place)
        return None if place == path else "somebody was quicker"

    kind = Kind("one of ours", fault, is_directory)
    with (
        pytest.raises(FileExistsError, match="somebody was quicker"),
        atomic_files.new_path(path, kind, overwrite=True) as new,
    ):
        make(new, is_directory, "new")
    assert len(looks) == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]
    assert os.path.samestat(path.lstat(), before)


@pytest.mark.parametrize("is_directory", [False, True])
def test_what_cannot_come_back_is_kept_under_another_name(way: str, is_directory: bool, tmp_path: Path) -> None:
    """As above, and its name is taken by somebody else, or what was put there is gone."""
    path = tmp_path / "it"
    make(path, is_directory, "ours")
    before = path.lstat()

    def fault(place: Path) -> str | None:
        if place == path:
            return None
        if way == "claim":
            path.write_text("theirs")
        else:
            path.rename(tmp_path / "theirs")
        return "somebody was quicker"

    kind = Kind("one of ours", fault, is_directory)
    with (
        pytest.raises(FileExistsError, match="somebody was quicker"),
        atomic_files.new_path(path, kind, overwrite=True) as new,
    ):
        make(new, is_directory, "new")
    kept = path.with_name("it.old") if way == "claim" else path
    assert os.path.samestat(kept.lstat(), before)
    assert sorted(os.listdir(tmp_path)) == (["it", "it.old"] if way == "claim" else ["it", "theirs"])


def test_a_file_system_without_the_system_call_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Callable[..., int]:
        def function(*arguments: object) -> int:
            renaming.ctypes.set_errno(number)
            return -1

        return function

    for number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        monkeypatch.setattr(renaming, "_system_call", lambda number=number: refuse(number))
        atomic_files.write(tmp_path / "it", b"ours", KINDS[False])
        with pytest.raises(FileExistsError):
            atomic_files.write(tmp_path / "it", b"ours")
    monkeypatch.setattr(renaming, "_system_call", lambda: refuse(errno.ENOSPC))
    with pytest.raises(OSError, match=r"No space left on device: '.*/new/other' -> '.*/other'"):
        atomic_files.write(tmp_path / "other", b"ours")
    assert os.listdir(tmp_path) == ["it"]


def test_what_is_set_aside_gets_a_name_that_is_free(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "it").write_text(str(number))
        atomic_files.set_aside(tmp_path / "it")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "it.old": "0", "it.2.old": "1", "it.3.old": "2"
    }  # fmt: skip


# What processes leave that are killed

KILLED = """
import os, signal, sys
from pathlib import Path
from jmx.util import atomic_files
from jmx.util.atomic_files import renaming

if sys.argv[2] == "swapping":
    renaming._system_call = lambda: None
    rename = Path.rename

    def killed(path, target):
        rename(path, target)
        os.kill(os.getpid(), signal.SIGKILL)

    Path.rename = lambda path, target: (killed if "/old/" in str(target) else rename)(path, target)
kind = atomic_files.Kind("one of ours", lambda path: None)
with atomic_files.new_path(sys.argv[1], kind, overwrite=True) as new:
    new.write_text("ours, half")
    if sys.argv[2] == "live":
        print("here", flush=True)
        input()
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def start(path: Path, what: str) -> subprocess.Popen[str]:
    return light_process.start(KILLED, path, what)


def kill(path: Path, what: str) -> None:
    with start(path, what) as child:
        assert child.wait() == -9


def left(path: Path) -> list[Path]:
    return sorted(entry for entry in path.parent.iterdir() if entry.name.endswith(".part"))


def write(path: Path) -> list[str]:
    """Writes a file; gives the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        atomic_files.write(path, b"ours, whole", KINDS[False])
    return [str(warning.message) for warning in caught]


def test_leftovers_of_dead_writers_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "it"
    live = start(path, "live")
    assert live.stdout is not None
    assert live.stdout.readline() == "here\n"
    (alive,) = left(path)
    kill(path, "killed")
    (dead,) = {*left(path)} - {alive}
    assert write(path) == [f"removed {dead}, which a process left that was killed while it wrote {path}"]
    assert left(path) == [alive]
    assert (alive / "new" / "it").read_text() == "ours, half"
    path.unlink()
    live.communicate("go on\n")
    assert live.returncode == 0
    assert path.read_text() == "ours, half"
    assert left(path) == []


def test_a_disk_that_is_full_at_once_is_an_error_with_a_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/\.it\.[0-9a-f]{8}\.part/lock\.new'"):
        atomic_files.write(tmp_path / "it", b"")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "rmdir"])
def test_what_is_left_of_a_process_that_was_killed_before_it_had_a_lock_goes(call: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    killed = f"""
import os, signal
from jmx.util import atomic_files
make = os.{call}

def then_killed(*arguments, **options):
    made = make(*arguments, **options) if {call!r} != "rmdir" else None
    os.kill(os.getpid(), signal.SIGKILL)
    return made

os.{call} = then_killed
atomic_files.write({str(path)!r}, b"")
"""
    with light_process.start(killed) as child:
        assert child.wait() == -9
    path.unlink(missing_ok=True)
    (dead,) = left(path)
    assert write(path) == [f"removed {dead}, which a process left that was killed while it wrote {path}"]
    assert os.listdir(tmp_path) == ["it"]


@pytest.mark.parametrize("call", ["mkdir", "open", "write"])
def test_a_writer_whose_directory_is_taken_for_a_leftover_makes_another(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make, swept = tmp_path / "it", getattr(os, call), []

    def then_swept(*arguments, **options):
        made = make(*arguments, **options)
        if not swept:
            swept.extend(left(path))
            with pytest.warns(UserWarning, match="removed"):
                parts.remove_leftovers(path)
        return made

    monkeypatch.setattr(os, call, then_swept)
    atomic_files.write(path, b"whole")
    assert len(swept) == 1
    assert os.listdir(tmp_path) == ["it"]
    assert path.read_bytes() == b"whole"


def test_what_a_killed_process_had_moved_out_of_the_way_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_text("ours, the only one")
    kill(path, "swapping")
    assert not path.exists()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(FileExistsError, match="must not exist"):
            atomic_files.write(path, b"new")
    reported = f"{path} is back, which a process that was killed had not yet replaced"
    assert str(caught[0].message) == reported
    assert path.read_text() == "ours, the only one"
    assert left(path) == []


def test_what_a_killed_process_had_moved_away_stays_where_something_new_is(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_text("ours, the only one")
    kill(path, "swapping")
    path.write_text("ours, newer")
    (part,) = left(path)
    assert write(path) == [f"{part} holds what a process that was killed had not yet replaced: it stays"]
    assert (part / "old" / "it").read_text() == "ours, the only one"


def _dead(path: Path) -> Path:
    """The directory of a writer that died."""
    part = path.with_name(f".{path.name}.0123abcd.part")
    (part / "new").mkdir(parents=True)
    (part / "new" / path.name).write_text("half")
    note = {"schema": "jmx.part/1", "target": path.name, "machine": parts._machine()}
    (part / "lock").write_text(json.dumps(note))
    return part


def _note(**entries: object) -> Callable[[Path], object]:
    return lambda part: (part / "lock").write_text(json.dumps(json.loads((part / "lock").read_text()) | entries))


SIMILAR: dict[str, Callable[[Path], object]] = {
    "another name": lambda part: part.rename(part.with_name(".it.0123abcde.part")),
    "another target's name": lambda part: part.rename(part.with_name(".it.txt.0123abcd.part")),
    "letters": lambda part: part.rename(part.with_name(".it.0123WXYZ.part")),
    "a file in it": lambda part: (part / "notes").write_text("mine"),
    "no lock": lambda part: (part / "lock").unlink(),
    "a link for a lock": lambda part: [
        (part / "lock").rename(part.parent / "kept"), (part / "lock").symlink_to("../kept")
    ],
    "something else that has yet to be a lock": lambda part: [
        shutil.rmtree(part / "new"), (part / "lock").unlink(), (part / "lock.new").write_text("mine")
    ],
    "a FIFO that has yet to be a lock": lambda part: [
        shutil.rmtree(part / "new"), (part / "lock").unlink(), os.mkfifo(part / "lock.new")
    ],
    "a FIFO for a lock": lambda part: [(part / "lock").unlink(), os.mkfifo(part / "lock")],
    "a directory for a lock": lambda part: [(part / "lock").unlink(), (part / "lock").mkdir()],
    "a link to it": lambda part: [part.rename(part.parent / "mine"), part.symlink_to(part.parent / "mine")],
    "no JSON": lambda part: (part / "lock").write_text("{"),
    "a list": lambda part: (part / "lock").write_text("[]"),
    "another schema": _note(schema="jmx.part/2"),
    "another target": _note(target="that"),
    "no machine": _note(machine=None),
    "another machine": _note(machine={"host": "far away", "boot": "then"}),
}  # fmt: skip


@pytest.mark.parametrize("case", SIMILAR)
def test_what_is_only_like_a_leftover_stays(case: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    part = _dead(path)
    SIMILAR[case](part)
    before = sorted((entry, entry.lstat().st_ino) for entry in tmp_path.rglob("*"))
    reported = write(path)
    after = sorted((entry, entry.lstat().st_ino) for entry in tmp_path.rglob("*") if entry != path)
    assert after == before
    assert [line[:0] for line in reported] == ([""] if case == "another machine" else [])
    if reported:
        assert reported == [f"{part} is of another machine, 'far away': remove it if no process writes {path} there"]


def test_a_leftover_is_known_by_the_host_or_by_the_kernel(tmp_path: Path) -> None:
    path, here = tmp_path / "it", parts._machine()
    for machine in ({**here, "boot": "before this one"}, {**here, "host": "a container"}):
        if machine["boot"] == here["boot"] == "":
            continue  # not Linux
        part = _dead(path)
        _note(machine=machine)(part)
        assert write(path) == [f"removed {part}, which a process left that was killed while it wrote {path}"]
        assert os.listdir(tmp_path) == ["it"]
