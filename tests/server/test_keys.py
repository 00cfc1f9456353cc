"""API keys: which scope each opens, and what is no key file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.server.api_keys import KEYS_VARIABLE, find_keys
from ctx_compress_rag.server.run import listen

ONE, TWO = "k" * 16, "l" * 40


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert find_keys() is None
    monkeypatch.setenv(KEYS_VARIABLE, f"{ONE} anna,{TWO} bert")
    file = tmp_path / "keys"
    file.write_text(f"# of the tenants\n\n  {ONE}\tberta \n{TWO} bert\n")
    windows = tmp_path / "windows"
    windows.write_text(f"{ONE} anna\n{TWO} bert\n", encoding="utf-8-sig")
    for keys, first in ((find_keys(), "anna"), (find_keys(file), "berta"), (find_keys(windows), "anna")):
        assert keys is not None
        assert keys.scope_of(f"Bearer {ONE}") == keys.scope_of(f"bearer  {ONE}") == first
        assert keys.scope_of(f"Bearer {TWO}") == "bert"
        for wrong in (None, "", "Bearer", "Bearer ", ONE, f"Basic {ONE}", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}"):
            assert keys.scope_of(wrong) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no API key"),
        ("# none", "holds no API key"),
        (ONE, "line 1: write a key and its scope"),
        (f"{ONE} anna b", "line 1: write a key and its scope"),
        (f"{ONE} anna\n{ONE} bert", "line 2: repeats the key of scope 'anna'"),
        ("short anna", "scope 'anna' needs 16 or more"),
        (f"{'é' * 16} anna", "scope 'anna' needs 16 or more ASCII"),
    ],
)
def test_malformed_keys_are_refused_and_not_shown(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        find_keys(tmp_path / "keys")
    assert ONE not in str(caught.value)


def test_a_network_is_let_in_with_keys_only() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        listen(host, 0, guarded=False).close()
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match=f"--host {host} .*--api-keys"):
            listen(host, 0, guarded=False)
    listen("0.0.0.0", 0, guarded=True).close()
