# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.2.9"]
# ///
"""Checks that a change must pass, as sessions of nox: `python3 -m nox` runs lint, tests and bench.

These sessions run only on request, by `python3 -m nox -s NAME`: long, gpu, newest, tritons, fuzz, commands, browser,
report, docs, site, package. Each session makes a virtual environment and runs commands that docs/install.md explains:
they can also be run without nox. Words after `--` go to the command, as in `python3 -m nox -s bench -- --sweep full`. A
new session is a function here with the decorator `nox.session`; `default=False` makes it one on request. Continuous
integration runs the sessions that .ci/run and .github/workflows name.
"""

import argparse
import os
import re
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "tests", "bench"]
nox.options.default_venv_backend = "virtualenv"  # pip and its settings, also where uv is at hand
nox.options.reuse_venv = "yes"

TORCH = "torch==2.13.0"  # the version that sessions install
TRITON = "triton==3.6.0"  # installed where torch is built for CPUs and brings none: its interpreter runs the kernels
TRITONS = list(dict.fromkeys(re.findall(r'"([\d.]+)"', Path("lmsys/kernels/tritons.py").read_text())))  # supported
SITE = Path("reports/site")  # where the session `report` builds its page
WORKERS = str(min(8, 1 + (os.cpu_count() or 1)))  # processes that run tests; one more than CPUs, as one often waits
NOTHING_TO_BUILD = 3  # exit code of flash_cuda's build without a compiler: the tests of other rows can still run
PROJECT = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, group: str) -> None:
    """Installs torch, Triton where this build of torch has none, then the project with a dependency group."""
    session.install(TORCH)
    lookup = "import importlib.util, sys; print(sys.platform, importlib.util.find_spec('triton'))"
    answer = session.run_install("python", "-c", lookup, silent=True)
    if answer and answer.split() == ["linux", "None"]:
        session.install(TRITON)
    session.install("-e", ".", *nox.project.dependency_groups(PROJECT, group))


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style, format and types."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")
    session.run("python", "-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Runs all tests but the long ones, for every row that this machine can run."""
    install(session, "test")
    # The tests of a file run in one process, which makes their shared fixtures once. tests/conftest.py orders files,
    # the longest first. Tests start hundreds of interpreters: with bytecode on disk each module is compiled once.
    env = {"PYTHONDONTWRITEBYTECODE": ""}
    pytest = "python", "-m", "pytest", "-n", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder"
    session.run(*pytest, *session.posargs, env=env)


@nox.session(default=False)
def long(session: nox.Session) -> None:
    """Runs the tests that compile for a CPU or start many processes; CI runs them beside the others."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-n", WORKERS, "-m", "long", *session.posargs)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Runs the tests that need a CUDA device, after it has compiled the CUDA C++ kernels once, in parallel."""
    install(session, "test")
    session.run("python", "-m", "lmsys.attention.flash_cuda", success_codes=[0, NOTHING_TO_BUILD])
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """Runs some tests with the newest torch, Triton and numpy that pip finds, as README's commands install them."""
    session.install("--upgrade", "-e", ".[bench]", *nox.project.dependency_groups(PROJECT, "test"))
    session.run("lmsys")
    session.run("lmsys", "check", "flash_triton")
    tests = "tests/kernels", "tests/attention/test_attention.py", "tests/attention/test_flash_triton_decode.py"
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *(session.posargs or tests))


@nox.session(default=False)
@nox.parametrize("triton", TRITONS)
def tritons(session: nox.Session, triton: str) -> None:
    """Runs tests of kernels with one version of Triton, without a GPU: simulation, SASS, launches, exact numbers."""
    session.install(TORCH)
    session.install("-e", ".", *nox.project.dependency_groups(PROJECT, "test"))
    session.install("--no-deps", f"triton=={triton}")  # --no-deps: torch may require another version
    tests = "tests/kernels", "tests/attention/test_gluon_kernels.py", "tests/attention/test_sass.py"
    pytest = "python", "-m", "pytest", "-n", "2", "--dist", "loadfile"
    session.run(*pytest, *(session.posargs or tests))
    if not session.posargs:  # the tests of these files that a plain run leaves out
        session.run(*pytest, "-m", "on_request or long", *tests)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Gives each reader of files 100,000 damaged ones: it must return a result or raise ValueError, nothing else."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-n", "2", "tests/fuzz", *session.posargs, env={"LMSYS_FUZZ": "100000"})


@nox.session(default=False)
def commands(session: nox.Session) -> None:
    """Runs every command of README and docs, in order, with small sizes."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-n", "2", "-m", "on_request", "tests/test_commands.py", *session.posargs)


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """Tests the published page in the Chromium that is installed, else in one that Playwright installs."""
    install(session, "browser")
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        session.run("python", "-m", "playwright", "install", "chromium")
    session.run("python", "-m", "pytest", "-m", "browser", "tests/reports/test_browser.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Runs the benchmarks, then builds the report of their result."""
    install(session, "bench")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--benchmark-json", type=Path, default=Path("out/bench.json"))
    chosen, options = parser.parse_known_args(session.posargs)
    result = chosen.benchmark_json
    result.parent.mkdir(parents=True, exist_ok=True)
    try:
        session.run("python", "-m", "pytest", "benchmarks", "--benchmark-only", f"--benchmark-json={result}", *options)
    finally:  # also if a wrong row has made the command fail: the page shows this row
        if result.is_file():
            build(session, result.with_suffix(""), str(result))


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Builds the report of the result files that follow `--`, by default of the committed ones, without torch."""
    session.install(*nox.project.dependency_groups(PROJECT, "report"))
    build(session, SITE, *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Builds docs/ as a site in out/docs; a broken link is an error."""
    session.install(*nox.project.dependency_groups(PROJECT, "docs"))
    build_docs(session)


@nox.session(default=False)
def site(session: nox.Session) -> None:
    """Builds the site that GitHub Pages shows: docs/, and in out/docs/published the reports of the committed runs."""
    session.install(*nox.project.dependency_groups(PROJECT, "docs", "report"))
    build_docs(session)
    session.run("python", "-m", "reports", "-o", "out/docs/published")
    on_h100 = sorted(map(str, Path("reports/results/h100").glob("*.json.gz")))
    session.run("python", "-m", "reports", "-o", "out/docs/published/h100", *on_h100)


@nox.session(default=False)
def package(session: nox.Session) -> None:
    """Builds the wheel in out/dist. Installed from it or from git, `lmsys` must check, measure and report elsewhere."""
    session.install(TORCH, "build")
    root, dist = Path.cwd(), Path("out/dist").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--wheel", "--outdir", str(dist))
    (wheel,) = dist.glob("*.whl")
    for source in (wheel.as_uri(), f"git+{root.as_uri()}"):
        session.install(f"lmsys[bench] @ {source}")
        session.install("--force-reinstall", "--no-deps", f"lmsys @ {source}")  # both sources have the same version
        with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
            for example in ("mine.py", "bench_matmul.py"):
                shutil.copy(root / "docs" / "examples" / example, ".")
            session.run("lmsys")
            session.run("lmsys", "check", "mine.py:my_attention")
            session.run("python", "-m", "pytest", "bench_matmul.py", "--benchmark-json", "out.json")
            session.run("lmsys", "report", "out.json", "-o", "site")


def build_docs(session: nox.Session) -> None:
    """Builds docs/ as a site in out/docs."""
    session.run("python", "-m", "mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


def build(session: nox.Session, folder: Path, *arguments: str) -> None:
    """Builds the report of these result files in a folder, and logs the path of its page."""
    if session.run("python", "-m", "reports", "-o", str(folder), *arguments):  # None with --install-only
        session.log(f"report: {(folder / 'index.html').resolve()}")


if __name__ == "__main__":
    nox.main()
