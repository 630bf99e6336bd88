"""Files and directories that appear whole, or not at all."""

import pytest

from jmx import atomic_files


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
