"""docs/examples/slurm.sh: which launchers it starts on which nodes, and that two launchers on one node are refused.

There is no cluster: STUBS are shell scripts that take the place of Slurm's commands and of torchrun. HOSTS has a word
for each task, the node that it runs on; torchrun's stub writes its node and arguments to LOG.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import PAGES
from tests.support.processes import ROOT

JOB = ROOT / "docs" / "examples" / "slurm.sh"
STUBS = {
    "scontrol": 'for host in $HOSTS; do echo "$host"; done | sort -u',
    "hostname": 'echo "$HERE"',
    # A task for each word of HOSTS, as srun starts its command once for each task.
    "srun": '[ "$1" = --cpus-per-task ] && shift 2; for host in $HOSTS; do HERE=$host "$@" || exit 1; done',
    "torchrun": 'echo "$HERE: $*" >> "$LOG"',
}


def submitted(folder: Path, hosts: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The finished job, and the launchers that it has started, each as "node: arguments"."""
    bash = shutil.which("bash")
    assert bash
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!{bash}\n{body}\n")
        (folder / name).chmod(0o755)
    log = folder / "log"
    log.touch()
    asked = dict(line.split("=", 1) for line in JOB.read_text().splitlines() if line.startswith("#SBATCH --"))
    slurm = {
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "SLURM_JOB_ID": "71234",
        "SLURM_NNODES": asked["#SBATCH --nodes"],
        "SLURM_GPUS_ON_NODE": asked["#SBATCH --gpus-per-node"],
        "SLURM_CPUS_PER_TASK": asked["#SBATCH --cpus-per-task"],
    }
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOSTS": hosts, "LOG": str(log), **slurm}
    done = subprocess.run([bash, JOB, *arguments], env=environment, capture_output=True, text=True, timeout=60)
    return done, log.read_text().splitlines()


def test_one_launcher_starts_on_each_node(tmp_path: Path) -> None:
    done, launched = submitted(tmp_path, "gpu1 gpu2", "-m", "lmsys.training", "--output", "out/training")
    assert done.returncode == 0, done.stderr
    rendezvous = "--rdzv-id 71234 --rdzv-backend c10d --rdzv-endpoint gpu1:21234"
    line = f"--nnodes 2 --nproc-per-node 8 {rendezvous} -m lmsys.training --output out/training"
    assert launched == [f"gpu1: {line}", f"gpu2: {line}"]
    assert "#SBATCH --ntasks-per-node=1\n" in JOB.read_text()


@pytest.mark.parametrize("hosts", ["gpu1 gpu1", "gpu1 gpu1 gpu2 gpu2", "gpu1 gpu2 gpu1"])
def test_two_launchers_on_a_host_are_refused_before_they_start(hosts: str, tmp_path: Path) -> None:
    done, launched = submitted(tmp_path, hosts, "-m", "lmsys.training")
    assert done.returncode == 2 and "more than one launcher on gpu1" in done.stderr and launched == []


def test_the_page_shows_the_job_that_is_tested() -> None:
    page, job = PAGES["docs/nodes.md"], JOB.read_text()
    shown = [line for line in page.splitlines() if line.startswith(("#SBATCH ", "host=", "port="))]
    assert len(shown) == 5 and all(line in job for line in shown)
    assert [name for name in ("slurm.sh", "kubernetes.yaml") if f"](examples/{name})" not in page] == []
