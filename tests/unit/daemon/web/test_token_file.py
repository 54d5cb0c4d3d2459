"""The file with the token of the web page."""

import stat
from pathlib import Path

import pytest

from gpuyard.daemon.web.open_page import make_token, read_token
from gpuyard.errors import EnvironmentFault


def test_the_token_is_private_and_replaced_if_it_is_malformed_or_was_readable(tmp_path: Path) -> None:
    path = tmp_path / "web.token"
    token = read_token(path)
    assert (len(token) >= 43, read_token(path), stat.S_IMODE(path.stat().st_mode)) == (True, token, 0o600)
    assert make_token(path) != token
    path.write_text("short")
    assert len(read_token(path)) >= 43
    before = path.read_text()
    path.chmod(0o640)
    assert (read_token(path) != before, stat.S_IMODE(path.stat().st_mode)) == (True, 0o600)


def test_a_token_file_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        read_token(tmp_path / "no folder" / "web.token")
    (tmp_path / "web.token").write_bytes(b"\xff")
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        read_token(tmp_path / "web.token")
