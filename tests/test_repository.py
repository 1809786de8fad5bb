"""What no committed file may hold: addresses beside PyTorch's CPU index, and paths of somebody's machine."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED_HOST = "download.pytorch.org"
SVG_NAMESPACE = "www.w3.org"  # a name inside drawings, which nobody looks up
# Licence: its text is fixed. Lock files: written by tools, they name where each package came from.
EXEMPT = {"LICENSE", "uv.lock", "yarn.lock", "package-lock.json"}
# reserved for examples and documentation (RFC 2606, RFC 6761), and this machine itself
NO_HOST = re.compile(r"localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\]|([\w-]+\.)*(test|example|invalid|localhost)")
URL = re.compile(
    r"\b(?:https?|wss?|git|ssh|ftp)://(?:[^\s/@\"'<>`{}]*@)?([A-Za-z0-9_.\[\]:-]+?)(?::\d+)?(?=[\s/\"'<>`)\]}?#,;]|$)"
)
BARE = re.compile(r"\b(?:pypi|npmjs|anaconda|github|gitlab|huggingface|python|pytorch|jupyter)\.(?:org|com|co|io)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|opt|home/\w+|Users/\w+)/(?:main|shared|wheels|pypi|\.\w+|\w+)")


def tracked_files() -> list[Path]:
    """Files git tracks or would track, as text files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink() and path.name not in EXEMPT]


def findings(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(place, match) for every match in the repository's text files, this one excepted."""
    found = []
    for path in tracked_files():
        if path == Path(__file__):
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not text
        for number, line in enumerate(lines, 1):
            found += [(f"{path.relative_to(ROOT)}:{number}", match.group(0)) for match in pattern.finditer(line)]
    return found


def hosts() -> list[tuple[str, str]]:
    """(place, host) for each host name in a URL, or of a known registry without one."""
    named = [(place, URL.search(url).group(1)) for place, url in findings(URL)]  # type: ignore[union-attr]
    return [(place, host) for place, host in named + findings(BARE) if not NO_HOST.fullmatch(host)]


def test_the_only_host_name_is_pytorchs_cpu_index():
    assert [found for found in hosts() if found[1] not in (ALLOWED_HOST, "pytorch.org", SVG_NAMESPACE)] == []
    assert any(host == ALLOWED_HOST for _, host in hosts())


def test_constraints_hold_no_addresses():
    assert not any("://" in path.read_text() for path in (ROOT / "constraints").iterdir())


def test_no_path_of_one_machine_is_written_down():
    assert findings(MACHINE_PATH) == []
