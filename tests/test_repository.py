"""What no committed file may hold: package registries' addresses beside PyTorch's CPU index, and paths of a machine."""

import re
import subprocess
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
INDEX = "download.pytorch.org"
SVG_NAMESPACE = "www.w3.org"  # a name inside drawings, which nobody looks up
# Licence: its text is fixed. Lock files: written by tools, they name where each package came from.
EXEMPT = {"LICENSE", "uv.lock", "yarn.lock", "package-lock.json"}
# reserved for examples and documentation (RFC 2606, RFC 6761), and this machine itself
NO_HOST = re.compile(r"localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\]|([\w-]+\.)*(test|example|invalid|localhost)")
URL = re.compile(
    r"\b(?:https?|wss?|git|ssh|ftp)://(?:[^\s/@\"'<>`{}]*@)?([A-Za-z0-9_.\[\]:-]+?)(?::\d+)?(?=[\s/\"'<>`)\]}?#,;]|$)"
)
# Links for a reader: papers, and the homes and documentation of projects.
LINK = re.compile(
    r"(?:www\.)?(?:arxiv|doi|openreview|pytorch|jupyter|python)\.(?:org|net)|github\.com|huggingface\.co|"
    r"(?:[\w-]+\.)*(?:readthedocs\.io|github\.io|vllm\.ai|ray\.io)|docs\.(?:pytorch|python)\.org"
)
REGISTRY = re.compile(r"\b(?:[\w-]+\.)*(?:pypi|pythonhosted|npmjs|yarnpkg|anaconda)\.(?:org|com|io)\b")
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
    """(place, host) for each host name in a URL."""
    named = [(place, URL.search(url).group(1)) for place, url in findings(URL)]  # type: ignore[union-attr]
    return [(place, host) for place, host in named if not NO_HOST.fullmatch(host)]


def test_links_go_to_papers_and_projects_and_the_only_index_is_pytorchs():
    named = hosts()
    assert [
        (place, host) for place, host in named if host not in (INDEX, SVG_NAMESPACE) and not LINK.fullmatch(host)
    ] == []
    assert any(host == INDEX for _, host in named)


def test_no_package_registry_is_named():
    assert findings(REGISTRY) == []


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("arxiv.org", True),
        ("github.com", True),
        ("docs.vllm.ai", True),
        ("pypi.org", False),
        ("evil-github.com", False),
    ],
)
def test_what_counts_as_a_link_for_a_reader(host, passes):
    assert bool(LINK.fullmatch(host)) is passes


def test_constraints_hold_no_addresses():
    assert not any("://" in path.read_text() for path in (ROOT / "constraints").iterdir())


def test_no_path_of_one_machine_is_written_down():
    assert findings(MACHINE_PATH) == []


def test_committed_notebooks_hold_no_outputs(repository):
    for path in (repository / "notebooks").glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs") and cell.get("execution_count") is None, path.name
