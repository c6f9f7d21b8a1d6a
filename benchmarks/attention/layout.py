"""The report on attention: for each grid the tables and plots of each dtype, mask and direction.

`bench_attention.py` declares ATTENTION as its `layout`. `lmsys.reports.layout` explains the keys of a layout, and the
functions of `lmsys.reports.steps` and `lmsys.reports.special` its steps.
"""

from typing import Any

from benchmarks.layouts import LIMIT, WORDS, Layout

SHAPE = ["head_dim", "queries", "keys", "heads", "kv_heads", "batch"]
COMPARED = [["products", [["B", "S"], ["H", "D"]]], ["over"]]  # captions with constant products B·S, H·D; speedups
ATTENTION_KEYS = ["causal?", "D?", "S?", "S|", "visible!"]
FACETS = ["facets", ["D?"], ["S", "impl", "causal"]]
SIDE_BY_SIDE = (  # tables of many head dimensions hold several rows in one cell, as a / b / c
    'queries == keys and (section == "flash" and impl in ("naive", "flash_triton_torch_bwd", "flash_triton") or'
    ' section == "eager_compiled" and impl in ("naive", "naive_compiled"))'
)

RECTANGLES = [  # lengths of queries and keys, in the order of their sizes
    ["where", "queries != keys", [["labelled", {"S": "Q×K"}], ["worded", "S", ["queries", "keys"]]]]
]


def in_both_modes(stem: str, heading: str, *steps: Any) -> list[Any]:
    """Two lists of steps: for the cases in torch's usual mode, and for those in its deterministic mode."""
    return [
        [["only", "not deterministic"], ["cut", stem, heading], *steps],
        [["only", "deterministic"], ["cut", f"{stem}-deterministic", f"{heading}, {{deterministic}}"], *steps],
    ]


PASSES = ("{section}-{dtype}-{mask}-{direction}", "{direction}, {dtype}, {causal}")
KIND = (  # an expression: how a case differs from plain attention, with equal lengths and equal numbers of heads
    'joined("documents" if documents else "", f"window {window:,}" if window else "",'
    ' "capped scores" if softcap else "", "deterministic" if deterministic else "", "decoding" if offset else'
    ' "Q\N{NO-BREAK SPACE}≠\N{NO-BREAK SPACE}K" if queries != keys else'
    ' "grouped heads" if kv_heads != heads else "")'
)
ATTENTION: Layout = {
    "place": 10,
    "words": WORDS,
    "letters": "B is the batch, H the heads, Q the queries, K the keys, S the queries and keys alike, D the size of a"
    " head. ",
    "fastest": {
        "word": "attention",
        "title": "Fastest attention",
        "keys": {"direction": "direction", "dtype": "dtype", "head_dim": "D", "causal": "mask", "kind": "kind"},
        "values": {"kind": KIND},
        "before": {"flex": "documents or window or softcap"},  # which SDPA takes as a dense mask, or not at all
        "bases": ["sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_math", "naive"],
        "about": " D is the size of a head, Q the number of queries, K that of keys.",
        "kind": "attention",
    },
    "prepare": [
        ["checked", SHAPE, ["section", "dtype", "direction"]],
        ["labelled", {"causal": "mask", "peer": "whose"}],
        ["quiet", *SHAPE],
        [
            "fields",
            [
                {"name": "B", "role": "axis", "of": "batch"},
                {"name": "H", "role": "axis", "of": 'heads if heads == kv_heads else f"{heads:,}:{kv_heads:,}"'},
                {"name": "S", "role": "axis", "of": 'queries if queries == keys else f"{queries:,}×{keys:,}"'},
                {"name": "D", "role": "axis", "of": "head_dim"},
                {"name": "mask", "role": "detail", "of": '"causal" if causal else "full"'},
                {"name": "visible", "role": "detail", "of": 'f"{100 * visible_share:.3g} %"'},
                {"name": "name", "role": "detail", "of": "impl"},
            ],
        ],
        ["ordered", "section", "dtype", "causal", "direction", LIMIT, *SHAPE, "impl"],
    ],
    "chapters": [
        {
            "title": "Attention: {section}",
            "blocks": [
                *(
                    {
                        "of": [
                            ["only", 'section == "tokens16k"'],
                            ["with_any", "impl", "time_s"],
                            *steps[:2],
                            ["if_varies", "causal"],
                            *COMPARED,
                        ],
                        "lead": [["pivot", ["flops_per_s"], ATTENTION_KEYS]],
                    }
                    for steps in in_both_modes("{section}-{dtype}-{direction}", "{direction}, {dtype}, both masks")
                ),
                *(
                    {
                        "of": [["only", 'section == "dtypes"'], *RECTANGLES, *steps],
                        "lead": [
                            ["pivot", ["time_s"], ["direction?", "dtype?", "causal?", "D?", "S?", "S|"]],
                            ["pivot", ["speedup"], ["direction?", "dtype?", "causal?", "D?", "S?", "S|"]],
                        ],
                        "more": [["pivot", ["*", "-time_s"], ["direction?", "dtype?", "causal?", "D?", "S?", "S|"]]],
                    }
                    for steps in in_both_modes("{section}", "by dtype", *COMPARED)
                ),
                *(
                    {
                        "of": [["only", 'section != "dtypes"'], *RECTANGLES, *steps],
                        "lead": [
                            [
                                ["only", SIDE_BY_SIDE],
                                ["if_varies", "impl"],
                                ["pivot", ["time_s"], ["D"], "S", "impl", "time-by-dim"],
                            ],
                            [
                                ["only", SIDE_BY_SIDE],
                                ["if_varies", "impl"],
                                ["pivot", ["saved_bytes"], ["D"], "S", "impl", "saved-by-dim"],
                            ],
                            ["pivot", ["time_s", "speedup"], ATTENTION_KEYS],
                            [
                                "either",
                                [
                                    ["only", "queries == keys"],
                                    FACETS,
                                    ["peak", "dtype"],
                                    [
                                        "lines",
                                        ["flops_per_s", "time_s", "peak_bytes"],
                                        "S",
                                        {
                                            "xlabel": "sequence length S",
                                            "ceilings": {"flops_per_s": ["peak_text", "peak"]},
                                        },
                                    ],
                                ],
                                [FACETS, ["bars", ["time_s"], "S", {"word": "bars"}]],
                            ],
                        ],
                        "more": [["pivot", ["*", "-time_s"], ATTENTION_KEYS], ["heat_map", ATTENTION_KEYS]],
                    }
                    for steps in in_both_modes(*PASSES, *COMPARED)
                ),
                {
                    "title": "",
                    "lead": [
                        [
                            *RECTANGLES,
                            [
                                "parts_summary",
                                in_both_modes(*PASSES, *COMPARED),
                                "{section}-summary",
                                "Speedup over {bases}, geometric mean · {section}",
                            ],
                        ]
                    ],
                },
            ],
        },
        {
            "title": "Attention: all rows",
            "blocks": [
                {
                    "lead": [
                        [
                            ["ordered", "impl"],
                            ["read_as", "peer", [[True, "peer"], [False, "ours"]]],
                            [
                                "endings",
                                "name",
                                "label",
                                "peer",
                                {"word": "attention-implementations", "title": "Implementations"},
                            ],
                        ]
                    ],
                    "more": [
                        [
                            ["only", "not deterministic"],
                            [
                                "same_bits",
                                "attention-same-bits",
                                [
                                    ["forward", 'direction == "fwd"'],
                                    ["forward and backward", 'direction != "fwd"'],
                                ],
                            ],
                        ]
                    ],
                }
            ],
        },
    ],
}
