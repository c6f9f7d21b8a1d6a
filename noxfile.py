# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.2.9"]
# ///
"""Sessions: lint, tests, bench. On request: long, gpu, newest, tritons, fuzz, commands, browser, report,
docs, site, package.

Each wraps lines of docs/install.md.

`python3 -m nox -s bench -- --sweep full` hands what follows `--` to the wrapped command.
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

TORCH = "torch==2.13.0"
TRITON = "triton==3.6.0"  # for a torch that brings none, as CPU builds: there its interpreter runs the kernels
TRITONS = list(dict.fromkeys(re.findall(r'"([\d.]+)"', Path("lmsys/kernels/tritons.py").read_text())))  # each once
SITE = Path("reports/site")
WORKERS = str(min(8, 1 + (os.cpu_count() or 1)))  # of tests: one more than processors, for a test waits now and then
NOTHING_TO_BUILD = 3  # what flash_cuda's build exits with; its row then says why, and the others are tested
PROJECT = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, group: str) -> None:
    """torch first, so that its build decides whether triton has to be added; then the project and a group."""
    session.install(TORCH)
    lookup = "import importlib.util, sys; print(sys.platform, importlib.util.find_spec('triton'))"
    found = session.run_install("python", "-c", lookup, silent=True)
    if found and found.split() == ["linux", "None"]:
        session.install(TRITON)
    session.install("-e", ".", *nox.project.dependency_groups(PROJECT, group))


@nox.session
def lint(session: nox.Session) -> None:
    """Style, layout, types."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")
    session.run("python", "-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The laws, for every row that this machine can run."""
    install(session, "test")
    # A file's tests stay together: what they share is made once. conftest.py has the longest files begin first.
    # Tests start hundreds of interpreters, which need not all compile the same modules.
    env = {"PYTHONDONTWRITEBYTECODE": ""}
    pytest = "python", "-m", "pytest", "-n", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder"
    session.run(*pytest, *session.posargs, env=env)


@nox.session(default=False)
def long(session: nox.Session) -> None:
    """The laws that compile for a CPU or start many processes, which CI asks beside the others."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-n", WORKERS, "-m", "long", *session.posargs)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device, and before them the CUDA C++ kernels, compiled once and side by side."""
    install(session, "test")
    session.run("python", "-m", "lmsys.attention.flash_cuda", success_codes=[0, NOTHING_TO_BUILD])
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """README's environment: whichever torch, Triton and numpy pip brings today, and no row that refuses them."""
    session.install("--upgrade", "-e", ".[bench]", *nox.project.dependency_groups(PROJECT, "test"))
    session.run("lmsys")
    session.run("lmsys", "check", "flash_triton")
    tests = "tests/kernels", "tests/attention/test_attention.py", "tests/attention/test_flash_triton_decode.py"
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *(session.posargs or tests))


@nox.session(default=False)
@nox.parametrize("triton", TRITONS)
def tritons(session: nox.Session, triton: str) -> None:
    """Asks a version of Triton all that needs no GPU: simulation, SASS, launches, exact numbers."""
    session.install(TORCH)
    session.install("-e", ".", *nox.project.dependency_groups(PROJECT, "test"))
    session.install("--no-deps", f"triton=={triton}")  # whichever a CUDA build of this torch asks for
    tests = "tests/kernels", "tests/attention/test_gluon_kernels.py", "tests/attention/test_sass.py"
    pytest = "python", "-m", "pytest", "-n", "2", "--dist", "loadfile"
    session.run(*pytest, *(session.posargs or tests))
    if not session.posargs:  # what the suite leaves out
        session.run(*pytest, "-m", "on_request or long", *tests)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """100,000 spoiled files for each reader of a file: a result or a ValueError, and no other file is touched."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-n", "2", "tests/fuzz", *session.posargs, env={"LMSYS_FUZZ": "100000"})


@nox.session(default=False)
def commands(session: nox.Session) -> None:
    """Every command of the pages, run in order, small."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-n", "2", "-m", "on_request", "tests/test_commands.py", *session.posargs)


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """The published page in Chromium: the one that is installed, else one that Playwright brings."""
    install(session, "browser")
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        session.run("python", "-m", "playwright", "install", "chromium")
    session.run("python", "-m", "pytest", "-m", "browser", "tests/reports/test_browser.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure, then build the report of what was measured."""
    install(session, "bench")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--benchmark-json", type=Path, default=Path("out/bench.json"))
    chosen, options = parser.parse_known_args(session.posargs)
    result = chosen.benchmark_json
    result.parent.mkdir(parents=True, exist_ok=True)
    try:
        session.run("python", "-m", "pytest", "benchmarks", "--benchmark-only", f"--benchmark-json={result}", *options)
    finally:  # a row that is wrong fails the run, and stands on the page
        if result.is_file():
            build(session, result.with_suffix(""), str(result))


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Rebuild the report from the result files given, without torch."""
    session.install(*nox.project.dependency_groups(PROJECT, "report"))
    build(session, SITE, *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The pages of docs/ as a site, in out/docs; a link that leads nowhere is an error."""
    session.install(*nox.project.dependency_groups(PROJECT, "docs"))
    build_docs(session)


@nox.session(default=False)
def site(session: nox.Session) -> None:
    """The same site, with the reports of the committed runs in out/docs/published: what GitHub Pages shows."""
    session.install(*nox.project.dependency_groups(PROJECT, "docs", "report"))
    build_docs(session)
    session.run("python", "-m", "reports", "-o", "out/docs/published")
    on_h100 = sorted(map(str, Path("reports/results/h100").glob("*.json.gz")))
    session.run("python", "-m", "reports", "-o", "out/docs/published/h100", *on_h100)


@nox.session(default=False)
def package(session: nox.Session) -> None:
    """The wheel, in out/dist, and the same by way of git: each checks, measures and reports in an empty folder."""
    session.install(TORCH, "build")
    root, dist = Path.cwd(), Path("out/dist").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--wheel", "--outdir", str(dist))
    (wheel,) = dist.glob("*.whl")
    for source in (wheel.as_uri(), f"git+{root.as_uri()}"):
        session.install(f"lmsys[bench] @ {source}")
        session.install("--force-reinstall", "--no-deps", f"lmsys @ {source}")  # they have the same version
        with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
            for example in ("mine.py", "bench_matmul.py"):
                shutil.copy(root / "docs" / "examples" / example, ".")
            session.run("lmsys")
            session.run("lmsys", "check", "mine.py:my_attention")
            session.run("python", "-m", "pytest", "bench_matmul.py", "--benchmark-json", "out.json")
            session.run("lmsys", "report", "out.json", "-o", "site")


def build_docs(session: nox.Session) -> None:
    session.run("python", "-m", "mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


def build(session: nox.Session, folder: Path, *arguments: str) -> None:
    if session.run("python", "-m", "reports", "-o", str(folder), *arguments):  # not so with --install-only
        session.log(f"report: {(folder / 'index.html').resolve()}")


if __name__ == "__main__":
    nox.main()
