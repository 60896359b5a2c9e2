"""Installing and loading: against the torch that is there, and in one sentence where that cannot be."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
import torch

import attn_ext
from attn_ext import _version_check

ROOT = Path(__file__).resolve().parent.parent
MINOR = ".".join(torch.__version__.split(".")[:2])
OTHER_TORCH = "1.99.0"

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


@pytest.fixture
def backend(monkeypatch):
    """The build backend, imported as pip does."""
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    import attn_ext_build

    return attn_ext_build


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


def fake_torch(folder: Path, version: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder / "torch"


# Loading under another torch


def test_a_build_loads_under_any_patch_release_of_its_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", f"{MINOR}.99+local")
    _version_check.check_build()


def test_another_torch_is_refused_in_one_sentence_before_anything_is_loaded():
    loading = (
        "import sys, torch\n"
        f"torch.__version__ = '{OTHER_TORCH}'\n"
        "try:\n"
        "    import attn_ext\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "assert 'libattn_ext' not in open('/proc/self/maps').read()\n"
    )
    result = run(sys.executable, "-c", loading, cwd=ROOT / "tests")
    assert result.returncode == 0, result.stderr
    (sentence,) = result.stdout.splitlines()
    assert re.match(
        rf"attn_ext was built against torch {MINOR}\.\S+ and cannot be loaded under torch {OTHER_TORCH}: "
        rf"run `{re.escape(sys.executable)} -m pip install .*`\.$",
        sentence,
    )


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": ROOT.as_uri(), "dir_info": {}}, f"--no-deps --force-reinstall --no-cache-dir {ROOT}"),
        (
            {"url": ROOT.as_uri(), "dir_info": {"editable": True}},
            f"--no-deps --no-build-isolation -e {ROOT}",
        ),
        (
            {"url": "https://forge.example/attn_ext", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "--no-deps --force-reinstall --no-cache-dir 'attn_ext @ git+https://forge.example/attn_ext@abc'",
        ),
        ({"url": "file:///gone/attn_ext", "dir_info": {}}, "'torch==2.12.*'"),
        ({"url": "file:///wheels/attn_ext.whl", "archive_info": {}}, "'torch==2.12.*'"),
        ({}, "'torch==2.12.*'"),
    ],
    ids=["folder", "editable", "git", "folder that is gone", "wheel", "unknown"],
)
def test_the_command_that_mends_it_fits_where_the_package_came_from(monkeypatch, origin, command):
    monkeypatch.setattr(_version_check, "_origin", lambda: origin)
    assert _version_check._mend("2.12.1") == f"{sys.executable} -m pip install {command}"


def test_an_unbuilt_source_tree_says_how_to_build_it(tmp_path):
    shutil.copytree(
        Path(attn_ext.__file__).parent,
        tmp_path / "attn_ext",
        ignore=shutil.ignore_patterns("_build_info.py", "__pycache__", "*.so", "lib"),
    )
    # An editable install adds a finder that would lend its own modules to this copy.
    loading = (
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
        "import attn_ext\n"
    )
    result = run(sys.executable, "-c", loading, cwd=tmp_path)
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path}/attn_ext is the source of attn_ext, not built: "
        f"run `{sys.executable} -m pip install "
        f"--no-build-isolation -e {tmp_path}`, or start Python elsewhere to use an installed one."
    )


# What a build asks for


def test_a_build_asks_for_no_torch_where_there_is_one(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backend, "site_folders", lambda: [str(tmp_path)])
    fake_torch(tmp_path, "2.12.1+cu130")
    assert backend.find_torch() == (str(tmp_path / "torch"), "2.12.1+cu130")
    assert not [r for r in backend.get_requires_for_build_wheel() if r.startswith("torch")]


def test_a_build_asks_for_a_fixed_torch_where_there_is_none(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backend, "site_folders", lambda: [str(tmp_path)])
    assert "torch==2.13.0" in backend.get_requires_for_build_wheel()


def test_attn_ext_torch_dir_rules(backend, monkeypatch, tmp_path):
    chosen = fake_torch(tmp_path, "2.11.0")
    monkeypatch.setenv("ATTN_EXT_TORCH_DIR", str(chosen))
    assert backend.find_torch() == (str(chosen), "2.11.0")


# uv, which builds in an environment of its own

# Plays uv to the build that it starts: it is the parent, and it is asked as `uv pip show`.
PIP_OF_UV = """
import os, subprocess, sys
words = sys.argv[1:]
if words[0] == "show":
    target = words[words.index("--python") + 1] if "--python" in words else os.environ.get("VIRTUAL_ENV")
    if target is None:
        sys.exit(2)
    if not os.path.exists(target + "/torch"):
        sys.exit(1)
    print("Name: torch\\nLocation: " + target)
else:
    building = "import attn_ext_build as b; b.site_folders = list; "
    building += "print(b.find_torch()); print(b.get_requires_for_build_wheel())"
    hidden = {**os.environ, "VIRTUAL_ENV": "/the/environment/of/the/build"}
    sys.exit(subprocess.run([sys.executable, "-S", "-c", building], cwd="/", env=hidden).returncode)
"""


@pytest.fixture
def uv(tmp_path):
    """`uv pip install` with some words and variables: what the build finds and asks for."""
    (tmp_path / "pip").write_text(PIP_OF_UV)
    (tmp_path / "sync").write_text(PIP_OF_UV)

    def uv(*words, **variables):
        environment = {**os.environ, **variables, "UV": sys.executable}
        environment["PYTHONPATH"] = str(ROOT / "build_backend")
        environment.pop("ATTN_EXT_TORCH_DIR", None)
        if "VIRTUAL_ENV" not in variables:
            environment.pop("VIRTUAL_ENV", None)
        return run(sys.executable, *words, cwd=tmp_path, env=environment)

    return uv


def test_uv_is_asked_for_the_torch_of_the_environment_that_is_activated(uv, tmp_path):
    torch_there = fake_torch(tmp_path / "env", "2.12.1")
    result = uv("pip", "install", ".", VIRTUAL_ENV=str(tmp_path / "env"))
    found, requires = result.stdout.splitlines()
    assert found == f"Torch(directory='{torch_there}', version='2.12.1')"
    assert "torch" not in requires


def test_uv_is_asked_for_the_torch_of_the_environment_that_its_command_names(uv, tmp_path):
    fake_torch(tmp_path / "activated", "2.11.0")
    torch_there = fake_torch(tmp_path / "env", "2.12.1")
    words = ["pip", "install", "--python", tmp_path / "env", "."]
    result = uv(*words, VIRTUAL_ENV=str(tmp_path / "activated"))
    assert str(torch_there) in result.stdout


def test_an_environment_of_uv_without_torch_gets_one(uv, tmp_path):
    (tmp_path / "env").mkdir()
    result = uv("pip", "install", ".", VIRTUAL_ENV=str(tmp_path / "env"))
    assert "torch==2.13.0" in result.stdout.splitlines()[1]


@pytest.mark.parametrize("command", ["pip", "sync"])
def test_no_torch_is_asked_for_where_uv_does_not_name_the_environment(uv, tmp_path, command):
    (tmp_path / "env").mkdir()
    result = uv(
        command, "install", ".", **({"VIRTUAL_ENV": str(tmp_path / "env")} if command == "sync" else {})
    )
    assert result.returncode == 1
    assert "--no-build-isolation" in result.stderr
    assert "Traceback" not in result.stderr


def test_too_old_a_torch_in_an_environment_of_uv_is_upgraded_by_uv(uv, tmp_path):
    fake_torch(tmp_path / "env", "2.10.2")
    result = uv("pip", "install", "--python", tmp_path / "env", ".")
    assert f"Upgrade it: uv pip install --python {tmp_path}/env torch==2.13.0" in result.stderr


# What a build lacks


def sentence_of_failure(backend) -> str:
    with pytest.raises(SystemExit) as failure:
        backend.check_build_requirements()
    return str(failure.value)


def test_too_old_a_torch(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_EXT_TORCH_DIR", str(fake_torch(tmp_path, "2.10.2")))
    assert sentence_of_failure(backend) == (
        f"attn_ext: torch 2.11 or later is needed; {tmp_path}/torch is torch 2.10.2. "
        f"Upgrade it: {sys.executable} -m pip install torch==2.13.0"
    )


def test_too_old_a_python(backend, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert sentence_of_failure(backend).startswith("attn_ext: Python 3.10 or later is needed; this is ")


def test_no_compiler(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert sentence_of_failure(backend).startswith("attn_ext: no C++ compiler was found")


def test_a_compiler_that_cxx_names_and_is_not_there(backend, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert "(looked for no-such-compiler)" in sentence_of_failure(backend)


def fake_tool(folder: Path, name: str, prints: str = "") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{prints}'\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


def test_no_ninja_and_no_cmake(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "tool_folders", lambda: [str(tmp_path)])
    assert sentence_of_failure(backend) == (
        f"attn_ext: the build needs cmake and ninja: {sys.executable} -m pip install cmake ninja"
    )


def test_too_old_a_cmake(backend, monkeypatch, tmp_path):
    fake_tool(tmp_path, "ninja")
    old = fake_tool(tmp_path, "cmake", "cmake version 3.18.4")
    monkeypatch.setattr(backend, "tool_folders", lambda: [str(tmp_path)])
    assert sentence_of_failure(backend) == (
        f"attn_ext: the build needs cmake (too old: 3.18.4 found in {old}, 3.22 needed): "
        f"{sys.executable} -m pip install cmake"
    )


def test_a_new_cmake_beside_python_is_taken_before_an_old_one_on_path(backend, monkeypatch, tmp_path):
    fake_tool(tmp_path / "on_path", "cmake", "cmake version 3.18.4")
    new = fake_tool(tmp_path / "beside_python", "cmake", "cmake version 3.22.0")
    folders = [str(tmp_path / "on_path"), str(tmp_path / "beside_python")]
    monkeypatch.setattr(backend, "tool_folders", lambda: folders)
    assert backend.find_cmake() == new


def test_too_old_a_setuptools(backend, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("setuptools"), "__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"setuptools is too old: 65\.5\.0 found, 77\.0 needed: /.* -m pip"):
        backend.build_sdist("nowhere")


def test_pip_shows_the_sentence_and_no_traceback(tmp_path):
    old = fake_torch(tmp_path, "2.10.2")
    result = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT),
        env={**os.environ, "ATTN_EXT_TORCH_DIR": str(old)},
    )
    assert result.returncode == 1
    assert "attn_ext: torch 2.11 or later is needed" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


# CMake

CONSUMER = """
cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES CXX)
find_package(attn_ext REQUIRED)
add_library(unneeded SHARED unneeded.cpp)
add_executable(consumer consumer.cpp)
target_link_options(consumer PRIVATE "LINKER:--as-needed")
target_link_libraries(consumer PRIVATE attn_ext::attn_ext unneeded)
"""


def needed_by_a_consumer(folder: Path, prefix: str) -> list[str]:
    """The libraries that a program loads which names no symbol of any."""
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(CONSUMER)
    (folder / "consumer.cpp").write_text("int main() {}\n")
    (folder / "unneeded.cpp").write_text("int unneeded() { return 0; }\n")
    build = folder / "build"
    run("cmake", "-S", folder, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", check=True)
    run("cmake", "--build", build, check=True)
    return re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", build / "consumer", check=True).stdout)


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("make")), reason="needs CMake and make")
def test_a_program_of_cmake_loads_the_library_and_the_linker_drops_what_else_it_does_not_need(tmp_path):
    needed = needed_by_a_consumer(tmp_path / "consumer", attn_ext.cmake_prefix_path)
    assert {"libattn_ext.so", "libtorch.so"} <= set(needed)
    assert "libunneeded.so" not in needed


# What an index page shows


@pytest.fixture
def metadata_of_a_wheel(tmp_path):
    pytest.importorskip("setuptools")
    asking = f"import attn_ext_build as b; b.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "build_backend")}
    run(sys.executable, "-c", asking, cwd=ROOT, env=environment, check=True)
    (folder,) = tmp_path.glob("*.dist-info")
    return metadata.Distribution.at(folder).metadata


def test_the_long_description_links_to_nothing_that_only_a_clone_has(metadata_of_a_wheel):
    text = metadata_of_a_wheel.get_payload() or metadata_of_a_wheel["Description"]
    links = re.findall(r"\]\(([^)]*)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert links == [link for link in links if link.startswith("https://")]
    assert "How it is built, and why: docs/design.md." in text
    assert metadata_of_a_wheel["Description-Content-Type"].startswith("text/markdown")


def test_every_python_that_is_served_is_named(metadata_of_a_wheel):
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(metadata_of_a_wheel.get_all("Classifier")))
    assert named == ["10", "11", "12", "13", "14"]


# Real builds, in fresh environments


def assert_names_no_folder_of_this_machine(package: Path, *folders: Path) -> None:
    for file in filter(Path.is_file, package.rglob("*")):
        for folder in folders:
            assert str(folder).encode() not in file.read_bytes(), (file, folder)


def assert_is_stripped(library: Path) -> None:
    assert ".symtab" not in run("readelf", "-SW", library, check=True).stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the source tree in which nothing is built."""
    copy = tmp_path_factory.mktemp("sources") / "attn_ext"
    if not (ROOT / ".git").exists():  # a source distribution
        made = shutil.ignore_patterns(
            "build", ".venv*", "*.so", "__pycache__", "*.egg-info", "_build_info.py"
        )
        shutil.copytree(ROOT, copy, ignore=made)
        return copy
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT, check=True)
    for name in filter(None, files.stdout.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture
def environment(tmp_path):
    """The Python of a new virtual environment that has pip and nothing else."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    probe = run(
        *(python, "-m", "pip", "download", "--no-deps", "--dest", tmp_path / "probe", "setuptools>=77")
    )
    if probe.returncode != 0:
        pytest.skip("no package index is in reach")
    return python


def site_packages(python: Path) -> Path:
    (folder,) = python.parent.parent.glob("lib/python*/site-packages")
    return folder


def requirement_of_torch(folder: Path) -> list[str]:
    (distribution,) = metadata.distributions(name="attn_ext", path=[str(folder)])
    return [r for r in distribution.requires or [] if re.match(r"torch\b", r)]


def link_this_torch(python: Path) -> Path:
    """Puts this environment's packages into another one by links; a replaced torch would be one no more."""
    ours = Path(torch.__file__).parent.parent
    theirs = site_packages(python)
    for package in ours.iterdir():
        unwanted = package.name.startswith(("attn_ext", "__editable__")) or package.suffix == ".pth"
        if not unwanted and not (theirs / package.name).exists():
            (theirs / package.name).symlink_to(package)
    return theirs / "torch"


@pytest.mark.slow
def test_an_isolated_install_builds_against_the_torch_that_is_there_and_keeps_it(
    environment, sources, tmp_path
):
    there = link_this_torch(environment)
    run(environment, "-m", "pip", "install", sources, check=True)
    assert there.is_symlink()
    assert requirement_of_torch(site_packages(environment)) == [f"torch=={MINOR}.*"]
    assert not (sources / "compile_commands.json").exists()  # several files are compiled as one
    using = "import torch, attn_ext; q = torch.ones(2, 3, 4); print(attn_ext.sdpa(q, q, q).sum().item())"
    result = run(environment, "-c", using, cwd=tmp_path, check=True)
    assert float(result.stdout) == 24.0
    package = site_packages(environment) / "attn_ext"
    assert needed_by_a_consumer(tmp_path / "consumer", str(package))
    assert_names_no_folder_of_this_machine(package, sources, ROOT, there, there.resolve())
    for library in package.glob("**/*.so"):
        assert_is_stripped(library)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_editors_find_the_compilers_commands_of_each_file(sources, tmp_path):
    build = tmp_path / "build"
    options = [f"-DATTN_EXT_TORCH_DIR={Path(torch.__file__).parent}", "-DATTN_EXT_PYTHON=ON"]
    options.append(f"-DPython_EXECUTABLE={sys.executable}")
    run("cmake", "-S", sources, "-B", build, *options, check=True)
    run("cmake", "--build", build, "--target", "compile_commands", check=True)
    commands = sources / "compile_commands.json"
    files = {Path(entry["file"]) for entry in json.loads(commands.read_text())}
    commands.unlink()
    assert files == set(sources.glob("csrc/**/*.cpp"))


@pytest.mark.slow
def test_an_isolated_build_without_torch_brings_one_and_requires_its_minor_version(
    environment, sources, tmp_path
):
    wheels = tmp_path / "wheels"
    run(environment, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", wheels, sources, check=True)
    (wheel,) = wheels.glob("attn_ext-*.whl")
    shutil.unpack_archive(wheel, tmp_path / "unpacked", "zip")
    assert requirement_of_torch(tmp_path / "unpacked") == ["torch==2.13.*"]


def test_the_version_is_that_of_the_metadata():
    assert attn_ext.__version__ == metadata.version("attn_ext")


def test_the_package_is_typed():
    assert (Path(attn_ext.__file__).parent / "py.typed").exists()
