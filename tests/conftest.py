"""Options of the suite: `--device` (or ATTN_EXT_TEST_DEVICE), `--slow` and `--bits`."""

import importlib.util
import itertools
import os
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        action="append",
        help="run tests on this device; may be repeated; default: cpu, and cuda where there is one",
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--bits", metavar="K/N", help="of the tests of test_bits.py, the K-th of N parts")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long or much memory; runs with --slow")
    config.addinivalue_line("markers", "careful: NaN and Inf must not spread; on a GPU by the composition")
    config.addinivalue_line("markers", "same_bits: does not run on a GPU, whose kernels do not promise it")


def _operators_of_torchvision() -> torch.library.Library | None:
    """What importing torchvision asks for. Its wheel is built for CUDA: beside a torch without, its library
    cannot be loaded, and neither torchvision nor what looks for it, as transformers does, can be imported.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


TORCHVISION = _operators_of_torchvision()  # gone with the object


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A file goes to one process, but for the tests of the instruction sets: each of these is as long as many
    files. In the order of collection, or one process would be left with them at the end.
    """
    from xdist.scheduler import LoadFileScheduling

    class LongTestsApart(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "test_numerical_tests_pass_on" in nodeid else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return LongTestsApart(config, log)


def _keep_a_part_of_the_bits(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--bits").split("/"))

    def is_left_out(item: pytest.Item) -> bool:
        # By name: tests of one dtype or length are as many places apart as there are dtypes or lengths.
        return item.path.name == "test_bits.py" and zlib.crc32(item.name.encode()) % parts != part

    config.hook.pytest_deselected(items=list(filter(is_left_out, items)))
    items[:] = itertools.filterfalse(is_left_out, items)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--bits"):
        _keep_a_part_of_the_bits(config, items)
    if config.getoption("--slow"):
        items.sort(key=lambda item: "slow" not in item.keywords)
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
    # torch.manual_seed would note down the stack for each kind of device that is not there, for later.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _what_gpus_promise(request: pytest.FixtureRequest) -> Iterator[None]:
    """On an NVIDIA GPU ``careful`` tests run on the composition, which alone keeps NaN and Inf of what is
    hidden apart, and those of ``same_bits`` do not run (docs/reliability.md)."""
    on_gpu = "device" in request.fixturenames and request.getfixturevalue("device") == "cuda"
    if on_gpu and request.node.get_closest_marker("same_bits"):
        pytest.skip("bits may differ from one call to the next on a GPU")
    math = on_gpu and request.node.get_closest_marker("careful")
    with sdpa_kernel(SDPBackend.MATH) if math else nullcontext():
        yield
