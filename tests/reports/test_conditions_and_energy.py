"""How the page shows energy, the state of the machine, and figures that were disturbed.

CASE has fields of energy, and STATE those of the machine's state, of a made-up record. A new law is an entry of SHOWN.
"""

from pathlib import Path

import pytest

from tests.support.records import NOT, ONCE, Record, hold_shown, record, report

CASE = {
    "energy_j": 0.512, "energy_integral_j": 0.51, "energy_per_token_j": 0.512 / 2048, "energy_power_w": 640.0,
    "energy_call_s": 8e-4, "flops_per_j": 1.25e12, "sustained_ceiling_fraction": 1.1,
}  # fmt: skip
STATE = {
    "sm_clock_mhz": 1755.4, "memory_clock_mhz": 3201.0, "power_w": 655.5, "temperature_c": 54.0,
    "clock_reasons": "power cap", "other_processes": 2, "others_cpu_share": 0.031,
}  # fmt: skip


NOTE = "the counter says 2 J, power over time 1: 100.0% apart"
ENERGY = {
    "Energy, J": "0.512", "Energy of a token, mJ": "0.250", "Power, W": "640", "Pace, ms": "0.800",
    "Work for energy, TFLOP/s/W": "1.25", "Share of sustained matmul, %": "110",
}  # fmt: skip
SAID = """SM clock 1,755 MHz, power 656 W
; SM clock 1,755 MHz, memory clock 3,201 MHz, power 656 W, temperature 54 °C, clock held by power cap, other processes\
 that had the device: 2, other programs took 3% of the CPU; run of"""
THROTTLED = "the device was throttled (power brake)"
FORWARD = "default-bfloat16-causal-fwd"
# {law: (records, facts about the machine, the rows of these tables with some of their cells, lines of these files)}
SHOWN: dict[str, tuple[list[Record], Record, dict[str, list[Record]], dict[str, str]]] = {
    "energy is a table of its own for each grid": (
        [
            *(record("attention", impl, section=name, **CASE) for impl in ("naive", "flex") for name in ("a", "b")),
            record("attention", "sdpa", section="b", **CASE | {"energy_note": NOTE}),
            record("attention", "flash_gluon", section="b", energy_note="the counter went back"),
        ],
        {},
        {
            "attention-a-energy": [{"row": "naive"} | ENERGY, {"row": "flex"} | ENERGY],
            "attention-b-energy": [
                {"row": "naive"} | ENERGY,
                {"row": "flash_gluon", "Energy, J": "not measured¹"},
                {"row": "sdpa", "Energy, J": "0.512²"},
                {"row": "flex"} | ENERGY,
            ],
        },
        {
            "tables/synthetic-gpu-attention-b-energy.md": f"² {NOTE}\n¹ the counter went back",
            "tables/synthetic-gpu-attention-a-energy.csv": ",0.512,",
            "index.html": "Energy of attention",
        },
    ),
    "without energy there is no chapter of it": (
        [record("attention", "naive", energy_note="this GPU has no counter of energy")],
        {},
        {},
        {"index.html": f"this GPU has no counter of energy\n{NOT}Energy of"},
    ),
    "a figure says the state of the machine": (
        [record("attention", "naive", **STATE)],
        {},
        {},
        {"index.html": SAID},
    ),
    "a figure leaves out what is as it should be": (
        [record("attention", "naive", **STATE | {"others_cpu_share": 0.0049})],
        {"settings": {"max_memory_mhz": 3201.0}},
        {},
        {"index.html": f"temperature 54 °C\n{NOT}memory clock 3,201\n{NOT}of the CPU"},
    ),
    "a disturbed figure is flagged, but for memory, which does not depend on it": (
        [
            record("attention", "naive", 1e-3, time_s=1e-3, disturbed=THROTTLED),
            record("attention", "flex", time_s=1e-3),
        ],
        {},
        {f"{FORWARD}-time": [{"naive": "1.00¹", "flex": "1.00"}]},
        {
            f"tables/synthetic-gpu-{FORWARD}-time.md": f"{ONCE}¹ Disturbed: {THROTTLED}.",
            f"tables/synthetic-gpu-{FORWARD}-peak.md": f"{NOT}Disturbed",
        },
    ),
    "a figure that was not disturbed is not flagged": (
        [record("attention", impl, time_s=1e-3) for impl in ("naive", "flex")],
        {},
        {f"{FORWARD}-time": [{"naive": "1.00", "flex": "1.00"}]},
        {f"tables/synthetic-gpu-{FORWARD}-time.md": f"{NOT}Disturbed"},
    ),
    "the machine's settings, and what it sustains, are facts": (
        [record("attention", "naive")],
        {
            "settings": {"ecc": "on", "power_limit_w": 700.0, "max_sm_mhz": 1980.0, "governor": "performance"},
            "sustained": {
                "matmul_flops_per_s": {"bfloat16": 6e14},
                "seconds": 4.0,
                "sm_clock_mhz": 1395.0,
                "power_w": 699.1,
                "clock_reasons": "power cap",
            },
        },  # fmt: skip
        {},
        {
            "index.html": (
                "<tr><th>ECC<td>on\n<tr><th>power limit<td>700 W\n<tr><th>highest SM clock<td>1,980 MHz\n"
                f"<tr><th>CPU frequency governor<td>performance\n{NOT}<tr><th>MIG\n"
                "<tr><th>matmul bfloat16, sustained<td>600 TFLOP/s, 75% of the short one, SM clock 1,395 MHz,"
                " power 699 W, clock held by power cap"
            )
        },
    ),
    "a figure says its rounds, spread, error and run": (
        [record("attention", "naive", time_s=1e-3, p20_s=9e-4, p80_s=1.05e-3, error_ratio=0.25)],
        {},
        {},
        {
            "index.html": (
                '<td title="10 rounds; p20 to p80 0.900 to 1.05 ms; error 0.250 of what is allowed;\n'
                "run of 2000-01-02 03:04, commit 0123456789"
            )
        },
    ),
    # Its p20 and p80 are more than a fifth of the median apart; without both of them nobody knows.
    **{
        f"a figure of 1 ms from {low} to {high} is {'unsteady' if is_flagged else 'steady'}": (
            [record("attention", "naive", time_s=1e-3, p20_s=low, p80_s=high)],
            {},
            {},
            {f"tables/synthetic-gpu-{FORWARD}-time.md": f"{'' if is_flagged else NOT}Unsteady"},
        )
        for low, high, is_flagged in (
            (1e-3, 1.19e-3, False),
            (1e-3, 1.21e-3, True),
            (None, 9e-3, False),
            (1e-4, None, False),
        )
    },
}


@pytest.mark.parametrize("law", SHOWN)
def test_the_page_shows_what_a_machine_did(law: str, tmp_path: Path) -> None:
    records, machine, tables, texts = SHOWN[law]
    hold_shown(report(tmp_path, records, **machine), tables, texts)
