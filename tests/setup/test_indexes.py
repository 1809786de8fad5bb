"""pip's configuration, said in uv's words."""

from rlbench.setup.indexes import UvOptions, parse_pip_config, uv_options

LISTING = """\
:env:.disable-pip-version-check='1'
:env:.find-links='/wheels'
global.find-links='/other /wheels'
global.index-url='https://mirror.test/simple'
global.timeout='30'
install.timeout='60'
list.format='columns'
"""


def values(options: UvOptions, flag: str) -> list[str]:
    """What follows each `flag`."""
    return [value for name, value in zip(options.flags, options.flags[1:], strict=False) if name == flag]


def test_environment_beats_command_section_beats_global_section():
    pip = parse_pip_config(LISTING)
    assert pip["find-links"] == "/wheels"
    assert pip["timeout"] == "60"
    assert pip["index-url"] == "https://mirror.test/simple"


def test_options_of_other_commands_are_left_out():
    assert "format" not in parse_pip_config(LISTING)


def test_a_value_may_hold_equal_signs_and_quotes():
    assert parse_pip_config("global.index-url='https://u:p=1@h.test/s'")["index-url"] == "https://u:p=1@h.test/s"


def test_indexes_and_links_become_flags_in_their_order():
    pip = {
        "index-url": "https://a.test/s",
        "extra-index-url": "file:///b\nhttps://c.test/s",
        "find-links": "/d  /e",
    }
    options = uv_options(pip, {})
    assert values(options, "--default-index") == ["https://a.test/s"]
    assert values(options, "--index") == ["file:///b", "https://c.test/s"]
    assert values(options, "--find-links") == ["/d", "/e"]


def test_every_index_is_asked_as_pip_does():
    assert values(uv_options({}, {}), "--index-strategy") == ["unsafe-best-match"]


def test_no_index_counts_only_when_true():
    assert "--no-index" in uv_options({"no-index": "true"}, {}).flags
    assert "--no-index" not in uv_options({"no-index": "0"}, {}).flags


def test_certificates_hosts_proxy_and_timeout_reach_uv():
    pip = {
        "cert": "/ca.pem",
        "trusted-host": "h1.test h2.test",
        "proxy": "http://p.test:1",
        "default-timeout": "180",
    }
    options = uv_options(pip, {})
    assert values(options, "--allow-insecure-host") == ["h1.test", "h2.test"]
    assert options.env == {
        "SSL_CERT_FILE": "/ca.pem",
        "HTTP_PROXY": "http://p.test:1",
        "HTTPS_PROXY": "http://p.test:1",
        "UV_HTTP_TIMEOUT": "180",
    }


def test_what_the_caller_set_for_uv_itself_is_left_alone():
    assert uv_options({"cert": "/ca.pem"}, {"SSL_CERT_FILE": "/mine.pem"}).env == {}


def test_the_fallback_index_comes_last():
    options = uv_options({"extra-index-url": "https://a.test/s"}, {}).with_index("https://z.test/cpu")
    assert values(options, "--index") == ["https://a.test/s", "https://z.test/cpu"]
