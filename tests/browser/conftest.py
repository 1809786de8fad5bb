"""One JupyterLab and one Chromium for all tests of this folder, ended after the last of them.

Everything here is `browser`. The tests run where a Chromium of the system is found, or named by `RLB_CHROMIUM`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

from tests.browser import kernels, language_pack
from tests.browser import lab as driver
from tests.browser.lab import Lab, Notebook
from tests.browser.panels import ROOT
from tests.browser.shared import Shared

HERE = Path(__file__).parent
HUB_URL = "/user/ada/"
"""What a JupyterHub has the addresses of one user's server begin with."""
FAILED = pytest.StashKey[bool]()
"""Whether a test has failed, for a page that tests share: the next one gets another."""
NO_CHROMIUM = "no chromium: apt-get install chromium, or name one in RLB_CHROMIUM"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where it has no browser."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if driver.CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Keep a picture of what a failed test saw: in `build/browser/`, one for each of its notebooks."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        for notebook in Notebook.opened:
            picture = f"{re.sub(r'[^a-zA-Z0-9_-]+', '-', item.name)}-{notebook.name}.png"
            try:
                notebook.screenshot(item.config.rootpath / "build" / "browser" / picture)
            except PlaywrightError as error:  # a page that crashed has no picture
                report.sections.append((f"picture of {notebook.name}", str(error)))
    return report


# "package": playwright's sync interface leaves an event loop running in this thread, and other rooms need their own
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=driver.CHROMIUM, args=driver.CHROMIUM_ARGS)
        yield launched
        launched.close()


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[Lab]:
    """A JupyterLab whose kernels find the tiny model, with a cluster of their own if they start one."""
    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture(scope="package")
def hub(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server as a JupyterHub starts it, with a language pack; its kernels' cluster is that of the other one."""
    folder = tmp_path_factory.mktemp("hub")
    language_pack.write(folder / "site", ROOT / "extension")
    server = Lab(folder, base_url=HUB_URL, state=lab.state, PYTHONPATH=str(folder / "site"))
    yield server
    server.close()


@pytest.fixture(scope="package")
def kernel_names(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kernels of several ipykernel releases: their names, for `Notebook(kernel=…)`, by version."""
    return kernels.offer(lab, tmp_path_factory.mktemp("ipykernels"))


@pytest.fixture(scope="package")
def server(lab: Lab) -> Lab:
    """The JupyterLab that `open_notebook` opens notebooks in; a file may name another one."""
    return lab


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, server: Lab, browser: Any, repository: Path) -> Iterator[Shared]:
    """The notebook that a file's tests take in turns: its first cell is the file's `START`."""
    made = Shared(server, browser, [request.module.START.format(root=str(repository))])
    yield made
    made.close(check=True)


@pytest.fixture
def take(request: pytest.FixtureRequest, shared: Shared) -> Iterator[Callable[..., Notebook]]:
    """`take(theme=…)`: the shared notebook, its first cell alone; what a test adds is taken out again."""

    def take_one(theme: str = "light") -> Notebook:
        notebook = shared.take()
        notebook.theme(theme)
        return notebook

    yield take_one
    shared.give_back(request.node.stash.get(FAILED, False))


@pytest.fixture
def open_notebook(server: Lab, browser: Any) -> Iterator[Callable[..., Notebook]]:
    """`open_notebook(cells, kernel=…, theme=…)`: a `Notebook`, closed and checked for errors after the test."""
    opened: list[Notebook] = []

    def open_one(cells: Any = (), **options: Any) -> Notebook:
        opened.append(Notebook(server, browser, cells, **options))
        return opened[-1]

    yield open_one
    for notebook in opened:
        notebook.close(check=False)
    for notebook in opened:
        notebook.check()
