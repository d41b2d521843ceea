"""What every test gets: bounded threads, an untouched process, golden files, and no silent skips in CI."""

from __future__ import annotations

import importlib
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

# Read by native libraries while they load, so set before torch is imported; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
IN_CI = os.environ.get("METAVIZ_CI", "0") not in ("", "0")

torch.set_num_threads(2)
hypothesis.settings.register_profile("metaviz", deadline=None, derandomize=IN_CI)
hypothesis.settings.load_profile("metaviz")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ anew from what is seen"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Playwright leaves an event loop running in this thread until the session ends, and asyncio.run()
    # then refuses to start another: whatever needs a browser comes last.
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # No METAVIZ_CI here: a machine can lack a GPU for good, a library it cannot.
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")


@pytest.fixture(scope="session")
def unavailable() -> Callable[[str], None]:
    """``unavailable(reason)`` skips the test; under METAVIZ_CI=1, where all must be there, it fails it."""

    def give_up(reason: str) -> None:
        (pytest.fail if IN_CI else pytest.skip)(reason)

    return give_up


@pytest.fixture(scope="session")
def needs(unavailable) -> Callable[[str], ModuleType]:
    """``needs("transformers")`` imports an optional library, or gives the test up with the reason."""

    def need(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            unavailable(f"{name} cannot be imported ({error}); install it with: pip install -e '.[test]'")

    return need


@pytest.fixture(scope="session")
def checkout(unavailable) -> list[Path]:
    """The files of the repository: all that git tracks or would add."""
    # A clone that belongs to another user, as in some containers, is read all the same.
    git = ["git", "-c", f"safe.directory={ROOT}"]
    command = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True) if shutil.which("git") else None
    )
    if listed is None or listed.returncode:
        unavailable("the tests do not run from a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``golden(text)`` compares with ``tests/golden/<test name>.txt``; a second argument names the file."""

    def compare(text: str, name: str | None = None) -> None:
        slug = re.sub(r"\W+", "-", name or request.node.name.removeprefix("test_")).strip("-")
        path = GOLDEN / f"{slug}.txt"
        seen = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(seen, encoding="utf-8")
        elif not path.exists():
            pytest.fail(f"{path.name} is not there yet; run pytest --update-golden, then read what it wrote")
        assert seen == path.read_text(encoding="utf-8")

    return compare


def _process_state() -> dict[str, object]:
    return {
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "intra-op threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def process_stays_as_it_was() -> Iterator[None]:
    """Fail a test that leaves torch in another state, and put it back so that only that test fails.

    Generators are put back too, but drawing from them is no fault: ask for ``generators_stay`` where it is.
    """
    before, torch_draws, python_draws = _process_state(), torch.get_rng_state(), random.getstate()
    yield
    after = _process_state()
    torch.set_rng_state(torch_draws)
    random.setstate(python_draws)
    moved = [f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]]
    if moved:
        # None, not before's device: naming "cpu" would leave a function mode behind.
        torch.set_default_device(None)
        torch.set_default_dtype(before["default dtype"])
        torch.set_grad_enabled(before["grad mode"])
        torch.set_num_threads(before["intra-op threads"])
    assert not moved, f"the test left the process changed: {'; '.join(moved)}"


@pytest.fixture
def generators_stay() -> Iterator[None]:
    """Fail a test that draws from torch's CPU generator or from Python's own."""
    torch_draws, python_draws = torch.get_rng_state(), random.getstate()
    yield
    assert torch.equal(torch.get_rng_state(), torch_draws), "torch's CPU generator has moved"
    assert random.getstate() == python_draws, "Python's generator has moved"
