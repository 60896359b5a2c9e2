"""Options of the suite: `--device` (or ATTN_EXT_TEST_DEVICE) and `--slow`."""

import os

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        action="append",
        help="run tests on this device; may be repeated; default: cpu, and cuda where there is one",
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long or much memory; runs with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def devices(config: pytest.Config) -> list[str]:
    chosen = config.getoption("--device") or os.environ.get("ATTN_EXT_TEST_DEVICE", "").split()
    return chosen or ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices(metafunc.config), scope="session")


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {devices(config)}"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
