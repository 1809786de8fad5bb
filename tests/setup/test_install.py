"""What uv is told: pip's configuration in its own variables, and the refusal of a second engine."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from rlbench.setup.install import install, parse_pip_config, uv_variables
from rlbench.setup.plan import ENGINES, SetupError

LISTING = """\
:env:.disable-pip-version-check='1'
:env:.find-links='/wheels'
global.find-links='/other /wheels'
global.index-url='https://u:p=1@mirror.test/simple'
global.timeout='30'
install.timeout='60'
list.format='columns'
"""


def test_environment_beats_command_section_beats_global_section():
    pip = parse_pip_config(LISTING)
    assert pip["find-links"] == "/wheels" and pip["timeout"] == "60"
    assert pip["index-url"] == "https://u:p=1@mirror.test/simple"
    assert "format" not in pip, "an option of another command"


def test_indexes_links_certificates_hosts_proxy_and_timeout_reach_uv():
    pip = {
        "index-url": "https://a.test/s",
        "extra-index-url": "file:///b\nhttps://c.test/s",
        "find-links": "/d  /e",
        "cert": "/ca.pem",
        "trusted-host": "h1.test h2.test",
        "proxy": "http://p.test:1",
        "default-timeout": "180",
    }
    assert uv_variables(pip, {}) == {
        "UV_DEFAULT_INDEX": "https://a.test/s",
        "UV_INDEX": "file:///b https://c.test/s",
        "UV_FIND_LINKS": "/d,/e",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_INSECURE_HOST": "h1.test h2.test",
        "HTTP_PROXY": "http://p.test:1",
        "HTTPS_PROXY": "http://p.test:1",
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_what_the_caller_set_for_uv_itself_is_left_alone():
    assert "SSL_CERT_FILE" not in uv_variables({"cert": "/ca.pem"}, {"SSL_CERT_FILE": "/mine.pem"})


@pytest.fixture
def engine() -> str:
    """The engine set that is installed here."""
    return next(name for name, distribution in ENGINES.items() if _is_installed(distribution))


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def test_the_other_build_of_vllm_is_not_written_over(engine):
    with pytest.raises(SetupError, match=f"{ENGINES[engine]} is installed"):
        install("gpu" if engine == "cpu" else "cpu")


def test_a_dry_run_prints_commands_with_what_decides_them(engine, capsys):
    install(engine, dry_run=True)
    *_, last = capsys.readouterr().out.splitlines()
    assert "UV_INDEX_STRATEGY=" in last and "--compile-bytecode" in last and last.endswith(f"'rlbench[{engine}]'")
