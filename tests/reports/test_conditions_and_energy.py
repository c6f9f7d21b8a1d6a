"""How the page shows energy, the state of the machine, and figures that were disturbed.

CASE has fields of energy, and STATE those of the machine's state, of a made-up record.
"""

import re
from pathlib import Path

import pytest

from tests.support.records import built, cells, hold_shown, numbers, record, report, save

CASE = {
    "energy_j": 0.512, "energy_integral_j": 0.51, "energy_per_token_j": 0.512 / 2048, "energy_power_w": 640.0,
    "energy_call_s": 8e-4, "flops_per_j": 1.25e12, "sustained_ceiling_fraction": 1.1,
}  # fmt: skip
STATE = {
    "sm_clock_mhz": 1755.4, "memory_clock_mhz": 3201.0, "power_w": 655.5, "temperature_c": 54.0,
    "clock_reasons": "power cap", "other_processes": 2, "others_cpu_share": 0.031,
}  # fmt: skip


def test_energy_is_a_table_of_its_own_for_each_grid(tmp_path: Path) -> None:
    records = [record("attention", impl, section=name, **CASE) for impl in ("naive", "flex") for name in ("a", "b")]
    note = "the counter says 2 J, power over time 1: 100.0% apart"
    records.append(record("attention", "sdpa", section="b", **CASE | {"energy_note": note}))
    records.append(record("attention", "flash_gluon", section="b", energy_note="the counter went back"))
    shown = {"Energy, J": "0.512", "Energy of a token, mJ": "0.250", "Power, W": "640", "Pace, ms": "0.800"}
    shown |= {"Work for energy, TFLOP/s/W": "1.25", "Share of sustained matmul, %": "110"}
    files = report(tmp_path, records)
    hold_shown(
        files,
        {
            "attention-a-energy": [{"row": "naive"} | shown, {"row": "flex"} | shown],
            "attention-b-energy": [
                {"row": "naive"} | shown,
                {"row": "flash_gluon", "Energy, J": "not measured¹"},
                {"row": "sdpa", "Energy, J": "0.512²"},
                {"row": "flex"} | shown,
            ],
        },
        {
            "tables/synthetic-gpu-attention-b-energy.md": f"² {note}\n¹ the counter went back",
            "index.html": "Energy of attention",
        },
    )
    assert float(numbers(files, "attention-a-energy")[0]["energy_j"]) == 0.512


def test_without_energy_there_is_no_chapter_of_it(tmp_path: Path) -> None:
    why = "this GPU has no counter of energy"
    page = report(tmp_path, [record("attention", "naive", energy_note=why)])
    assert "Energy of" not in page["index.html"].decode() and why in page["index.html"].decode()


SAID = """SM clock 1,755 MHz, power 656 W
; SM clock 1,755 MHz, memory clock 3,201 MHz, power 656 W, temperature 54 °C, clock held by power cap, other processes\
 that had the device: 2, other programs took 3% of the CPU; run of"""


def test_a_figure_says_the_state_of_the_machine(tmp_path: Path) -> None:
    hold_shown(report(tmp_path, [record("attention", "naive", **STATE)]), {}, {"index.html": SAID})


def test_a_figure_leaves_out_what_is_as_it_should_be(tmp_path: Path) -> None:
    case = record("attention", "naive", **STATE | {"others_cpu_share": 0.0049})
    page = report(tmp_path, [case], settings={"max_memory_mhz": 3201.0})["index.html"].decode()
    assert "memory clock 3,201" not in page and "of the CPU" not in page and "temperature 54 °C" in page


@pytest.mark.parametrize("disturbed", [None, "the device was throttled (power brake)"])
def test_a_disturbed_figure_is_flagged(disturbed: str | None, tmp_path: Path) -> None:
    case = record("attention", "naive", disturbed=disturbed)
    files = built(tmp_path / "out", save(tmp_path / "r.json", [case, record("attention", "flex")]))
    (line,) = cells(files, "default-bfloat16-causal-fwd-time")
    text = files["tables/synthetic-gpu-default-bfloat16-causal-fwd-time.md"].decode()
    assert line["naive"].endswith("¹") == bool(disturbed) and not line["flex"].endswith("¹")
    assert text.count("¹ Disturbed: the device was throttled (power brake).") == bool(disturbed)
    peak = files["tables/synthetic-gpu-default-bfloat16-causal-fwd-peak.md"].decode()
    assert "Disturbed" not in peak  # memory does not depend on it


def test_the_machines_settings_and_what_it_sustains_are_facts(tmp_path: Path) -> None:
    machine = {
        "settings": {"ecc": "on", "power_limit_w": 700.0, "max_sm_mhz": 1980.0, "governor": "performance"},
        "sustained": {
            "matmul_flops_per_s": {"bfloat16": 6e14}, "seconds": 4.0, "sm_clock_mhz": 1395.0, "power_w": 699.1,
            "clock_reasons": "power cap",
        },
    }  # fmt: skip
    page = report(tmp_path, [record("attention", "naive")], **machine)["index.html"].decode()
    facts = dict(re.findall("<tr><th>([^<]*)<td>([^<]*)", page))
    known = {
        "ECC": "on",
        "power limit": "700 W",
        "highest SM clock": "1,980 MHz",
        "CPU frequency governor": "performance",
    }
    state = "SM clock 1,395 MHz, power 699 W, clock held by power cap"
    known |= {"matmul bfloat16, sustained": f"600 TFLOP/s, 75% of the short one, {state}"}
    assert facts.items() >= known.items() and "MIG" not in facts
