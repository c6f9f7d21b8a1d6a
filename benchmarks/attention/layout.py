"""The layout of the report on attention: for each section the tables and plots of each dtype, mask and direction.

`bench_attention.py` declares ATTENTION as its `layout`; result files carry it, and `lmsys report` draws it. It is plain
data: to change or add a table or plot, edit its "lead" and "more"; then `python -m dev.layouts` writes it into the
committed results. `lmsys/reports/layout.py` explains these keys, and `benchmarks/layouts.py` the steps, `word` and the
signs in lists of fields, such as "D?". One more step draws here: ["heat_map", fields], a plot of speedups with a line
for each row (implementation) and a column for each combination of the fields' values. A section is a grid of
`benchmarks/sweeps.py`. Sections that no expression here names are all drawn alike, for each dtype, mask and direction.
"""

from typing import Any

from benchmarks.layouts import LIMIT, WORDS, Layout

# Fields of a record that make a shape.
SHAPE = ["head_dim", "queries", "keys", "heads", "kv_heads", "batch"]
# Two steps: the first ends captions in the products B·S and H·D where these are constant; the second adds speedups over
# the baseline.
COMPARED = [["products", [["B", "S"], ["H", "D"]]], ["over"]]
# Fields of the first columns of a table; "prepare", below, makes most of them from the fields of records.
ATTENTION_KEYS = ["causal?", "D?", "S?", "S|", "visible!"]
# A step: a plot for each value of D, if D varies, and of each other axis that is needed to tell cases apart besides S,
# row and mask.
FACETS = ["facets", ["D?"], ["S", "impl", "causal"]]
# An expression: true for the cases that get tables over many head dimensions. A cell there has the values of several
# rows, as a / b / c.
SIDE_BY_SIDE = (
    'queries == keys and (section == "flash" and impl in ("naive", "flash_triton_torch_bwd", "flash_triton") or'
    ' section == "eager_compiled" and impl in ("naive", "naive_compiled"))'
)

RECTANGLES = [  # a step: where any case has Q ≠ K, S is called Q×K, and sorted by queries, then by keys
    ["where", "queries != keys", [["labelled", {"S": "Q×K"}], ["worded", "S", ["queries", "keys"]]]]
]


def in_both_modes(stem: str, heading: str, *steps: Any) -> list[Any]:
    """Two lists of steps: for the cases in torch's usual mode, and for those in its deterministic mode.

    stem, heading  arguments of the step "cut": texts for file names and for headings, with fields in braces
    steps          steps that follow in both lists
    """
    return [
        [["only", "not deterministic"], ["cut", stem, heading], *steps],
        [["only", "deterministic"], ["cut", f"{stem}-deterministic", f"{heading}, {{deterministic}}"], *steps],
    ]


# Arguments of `in_both_modes`: the texts for each section, dtype, mask and direction.
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
    "fastest": {  # the question that the page answers first: `lmsys.reports.contest.Question` explains its keys
        "word": "attention",
        "title": "Fastest attention",
        "keys": {"direction": "direction", "dtype": "dtype", "head_dim": "D", "causal": "mask", "kind": "kind"},
        "values": {"kind": KIND},
        # With these options flex is the row to compare with: SDPA takes them as a dense mask, or not at all.
        "before": {"flex": "documents or window or softcap"},
        "bases": ["sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_math", "naive"],
        "about": " D is the size of a head, Q the number of queries, K that of keys.",
        "kind": "attention",
    },
    "prepare": [
        # Refuses cases in which a field of the first list is not a number, or a field of the second is not a text.
        ["checked", SHAPE, ["section", "dtype", "direction"]],
        ["labelled", {"causal": "mask", "peer": "whose"}],
        ["quiet", *SHAPE],  # captions leave these axes out: the fields below stand for them
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
                # Tables of both masks, where both were run; blocks of other sections follow. `in_both_modes` adds two
                # steps: "only" and "cut".
                *(
                    {
                        "of": [
                            ["only", 'section == "tokens16k"'],
                            ["with_any", "impl", "time_s"],  # rows with a time in any case
                            *steps,
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
                            # Draws the first of these two lists of steps that has anything to draw.
                            [
                                "either",
                                [
                                    ["only", "queries == keys"],
                                    FACETS,
                                    ["peak", "dtype"],  # adds `peak`, the matmul's rate in this dtype, and `peak_text`
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
                            # A table of geometric means of speedups: a line for each row, a column for each part that
                            # the lists of steps make. The last two arguments are `word` and the title.
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
                            # A table of how cases ended, for each combination of values of these fields.
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
                            # A table of the rows that give the same bits again. For each group of columns: its head,
                            # and an expression that is true of its cases.
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
