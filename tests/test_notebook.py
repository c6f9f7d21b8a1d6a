"""docs/examples/speedrun.ipynb is executed with small sizes, and its commands are checked for other machines.

For the latter, `runs` runs the cells in this process, with a torch that pretends to have other GPUs. Commands are
recorded, not started. To add a machine, add it to MACHINES.
"""

import ast
import json
import linecache
import re
import subprocess
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmsys.bench.__main__ import line_of
from lmsys.check.cases import DTYPES
from lmsys.training import __main__ as training
from tests.support.collected import collect
from tests.support.processes import ENVIRONMENT, PATIENCE_S, ROOT

EXAMPLES = ROOT / "docs" / "examples"
NOTEBOOK = EXAMPLES / "speedrun.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
NEEDS = "pip install nbclient ipykernel to run the notebook"
# Settings, which the notebook reads from the environment, for a run of seconds.
SMALL = {
    "MINUTES": "0.05",
    "LENGTHS": "32,64",
    "ROWS": "sdpa",
    "MODEL": "d_model=32 d_ff=64 num_layers=1 num_heads=2 context_length=64",
    "BATCH": "4",
}
SHOWING = re.compile(r"^import matplotlib|^from IPython", re.MULTILINE)  # marks cells that only draw results

T4 = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=15 * 2**30)
A100 = SimpleNamespace(name="A100", major=8, minor=0, total_memory=80 * 2**30)
RTX_3090 = SimpleNamespace(name="RTX 3090", major=8, minor=6, total_memory=24 * 2**30)
# {name: (number of GPUs, their properties; and what the notebook must choose: the dtype of attention, the precision of
# training, the number of its processes)}
MACHINES = {
    "CPU": (0, None, "float32", "fp32", 1),
    "one T4": (1, T4, "float16", "fp16", 1),
    "two T4": (2, T4, "float16", "fp16", 2),
    "two RTX 3090": (2, RTX_3090, "bfloat16", "bf16", 2),
    "four A100": (4, A100, "bfloat16", "bf16", 2),
}


def test_the_notebook_is_stored_without_outputs() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_two_or_three_sentences_precede_every_cell_of_code() -> None:
    for before, cell in zip(CELLS, CELLS[1:], strict=False):
        if cell["cell_type"] == "code":
            assert before["cell_type"] == "markdown"
            sentences = re.findall(r"\.(?=\s|$)", "".join(before["source"]))
            assert len(sentences) in (2, 3), before["source"]


def test_the_notebooks_kernel_is_that_of_the_examples() -> None:
    def kernel(text: str) -> str:
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        (dumped,) = (ast.dump(node) for node in functions if node.name == "my_attention")
        return dumped

    (cell,) = (text for text in CODE if "def my_attention" in text)
    assert kernel(cell) == kernel((EXAMPLES / "mine.py").read_text())


class Recorder:
    """Takes the place of subprocess.Popen: keeps the command, and writes the log that a training would have written."""

    stdout: tuple[str, ...] = ()
    returncode = 0

    def __init__(self, commands: list[list[str]], steps: int) -> None:
        self.commands, self.steps = commands, steps

    def __call__(self, command: list[str], cwd: Path, **_: Any) -> AbstractContextManager["Recorder"]:
        self.commands.append(command[1:])
        if "--output" in command:
            log = cwd / command[command.index("--output") + 1] / "log.jsonl"
            log.parent.mkdir(exist_ok=True)
            steps = [{"step": step, "loss": 8.0, "time_s": 0.5 * step} for step in range(1, self.steps + 1)]
            log.write_text("\n".join(map(json.dumps, [*steps, {"step": self.steps, "valid_loss": 8.0}])))
        return nullcontext(self)


def run_cells() -> None:
    """Runs all cells of code in this process, except those that only draw results."""
    names: dict[str, Any] = {"__name__": "notebook"}
    for place, text in enumerate(CODE):
        if not SHOWING.search(text):
            name = f"<cell {place}>"
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)  # where inspect finds source text
            exec(compile(text, name, "exec"), names)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[list[str]], str]]:
    """{machine: (the commands, without `python`, that the notebook runs there, what it prints)}."""
    found = {}
    for machine, (count, gpu, *_) in MACHINES.items():
        recorded: list[list[str]] = []
        with pytest.MonkeyPatch.context() as here, redirect_stdout(StringIO()) as printed:
            here.chdir(tmp_path_factory.mktemp("notebook"))
            here.setattr(torch.cuda, "device_count", lambda count=count: count)
            here.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
            here.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
            here.setattr(subprocess, "Popen", Recorder(recorded, steps=1 if machine == "CPU" else 3))  # slow, quick
            run_cells()
        found[machine] = recorded, printed.getvalue()
    return found


def the_one(commands: list[list[str]], name: str) -> list[str]:
    """The only command that is `lmsys NAME`."""
    (words,) = (words for words in commands if words[:3] == ["-m", "lmsys", name])
    return words


@pytest.mark.parametrize("machine", MACHINES)
def test_its_commands_are_accepted_on_every_machine(machine: str, runs: dict[str, tuple[list[list[str]], str]]) -> None:
    _, gpu, dtype, precision, world_size = MACHINES[machine]
    commands, printed = runs[machine]
    assert ("has no bfloat16" in printed and "loss scaling" in printed) == (gpu is T4)
    assert f"strategy {'bucketed' if world_size == 2 else 'none'}, processes: {world_size}" in printed
    trainings = [words for words in commands if words[1] == "torch.distributed.run" or words[2:3] == ["train"]]
    assert sum("--output" in words for words in trainings) == 2
    for words in trainings:
        check_training(words, precision, world_size)
    assert {words[1] for words in commands if words not in trainings} == {"lmsys"}
    bench, check = the_one(commands, "bench"), the_one(commands, "check")
    assert bench[3] == "attention" and bench[bench.index("--dtype") + 1] == dtype
    dtypes = set(check[check.index("--dtype") + 1].split(","))
    assert dtypes == set(DTYPES) - ({"bfloat16"} if gpu is T4 else set())


def check_training(words: list[str], precision: str, world_size: int) -> None:
    """AssertionError unless the command of a training has valid settings, and its processes can divide the batch."""
    launched = words[1] == "torch.distributed.run"
    start = words.index("lmsys.training") + 1 if launched else 3
    asked = training.parser().parse_args(words[start:])
    if asked.config is not None:  # a command that continues a training reads the configuration of that training
        return
    config = training.read_config(asked)
    assert launched == (world_size == 2) and config.train.precision == precision
    assert not launched or words[words.index("--nproc-per-node") + 1] == str(world_size)
    assert config.train.accumulation(world_size) == 1


def test_it_measures_each_row_at_each_length(runs: dict[str, tuple[list[list[str]], str]]) -> None:
    """On each machine the benchmark has two cases for each row and length: forward and backward.

    The row of the notebook's own kernel is taken from docs/examples/mine.py, which has the same kernel.
    """
    lines = [line_of(the_one(commands, "bench")[3:])[2:] for commands, _ in runs.values()]
    benches = [[word.replace("mine.py", str(EXAMPLES / "mine.py")) for word in line] for line in lines]
    for line, collected in zip(benches, collect(benches), strict=True):
        rows, lengths = (line[line.index(option) + 1].split(",") for option in ("--attention", "--length"))
        assert collected["code"] == 0, collected["said"]
        assert len(collected["ids"]) == 2 * len(rows) * len(lengths), line  # forward and backward


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the settings SMALL. One process trains for three seconds; tests/training has trainings of two."""
    nbformat = pytest.importorskip("nbformat", reason=NEEDS)
    nbclient = pytest.importorskip("nbclient", reason=NEEDS)
    pytest.importorskip("ipykernel", reason=NEEDS)
    text = tmp_path / "text.md"
    text.write_text((ROOT / "docs" / "results.md").read_text())
    small = {f"LMSYS_NOTEBOOK_{name}": value for name, value in {**SMALL, "CORPUS": str(text)}.items()}
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))  # and not in the home folder
    small["IPYTHONDIR"] = str(tmp_path / "ipython")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=int(PATIENCE_S), kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=ENVIRONMENT | small)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    shown = [kind for output in outputs for kind in output.get("data", ())]
    assert "my_attention: " in printed and " cases right on this " in printed
    assert "strategy none, processes: 1, precision fp32" in printed
    assert f"sample of step {last_step(tmp_path / 'speedrun' / 'model')}" in printed
    assert shown.count("image/svg+xml") >= 3 and shown.count("text/markdown") >= 3 and shown.count("image/png") == 1
    assert (tmp_path / "speedrun" / "page" / "index.html").is_file()


def last_step(folder: Path) -> int:
    return json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["step"]
