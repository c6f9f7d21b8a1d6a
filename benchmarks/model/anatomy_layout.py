"""The layout of the report on a model's anatomy: where time goes, by kernel and part; where memory goes, by phase.

`bench_anatomy.py` declares ANATOMY as its `layout`; result files carry it, and `lmsys report` draws it. It is plain
data: to change or add a table or plot, edit TIME_GOES or MEMORY_GOES, the blocks of the two chapters; then
`python -m dev.layouts reports/results/*.json.gz` writes it into the committed results. A *part* is a part of the model,
such as attention or the feed-forward; a *row* is an implementation of attention, or somebody else's whole model.
`lmsys/reports/layout.py` explains the keys of layouts and blocks ("place", "of", "lead", "more").
`benchmarks/layouts.py` explains the steps that draw, `word` and the signs in lists of fields; the other steps are in
`steps.py`, `special.py` and `views.py` of `lmsys/reports`. An item of "lead" or "more" is a step that draws, or a list
of steps of which the last one draws.

The step ["unfolded", field, fields] reads a list in the record of each case, such as `parts`, and replaces the case by
one case for each entry of the list. Its argument `fields` declares the fields of these entries. A declared field is a
metric, unless it has "role": "detail": then "*" in a list of fields leaves it out, and only other steps read it.

The arguments of "listing" are, in this order: the fields of the first columns, those of the other columns, `word`, the
title, the text about the table, and the fields of its data (the argument `data` of "pivot").
"""

from typing import Any

from benchmarks.layouts import LIMIT, WORDS, Layout

# Fields of the first columns of tables.
ANATOMY_KEYS = ["size?", "context?", "batch?", "precision?", f"{LIMIT}?", "mode?", "compile", "impl"]
PART_FIELDS = [  # fields of the entries of a record's list `parts`
    {"name": "name", "label": "part"},
    {"name": "total_s", "unit": "s", "label": "time", "shown": "ms"},
    {"name": "backward_s", "unit": "s", "label": "backward", "shown": "ms"},
]
# Kinds of kernels: records have a field `{kind}_share` for each. This is a copy of `lmsys.measure.profile.KINDS`: add a
# new kind to both.
KINDS = ["matmul", "attention", "elementwise", "reduction", "copy", "communication", "other"]
# What memory holds: records have the fields `{name}_bytes` and `predicted_{name}_bytes` for each. bench_anatomy.py has
# the same names in HELD_IN_A_STEP: add a new one to both.
MEASURED = ["parameters", "gradients", "optimizer", "activations"]
# `format`, with a name of MEASURED and the bytes of a GiB, makes an expression of this template. Its value is a text
# such as "3.1 / 3.0 (-3.2 %)".
DEVIATION = (
    'f"{{number({0}_bytes / {1})}} / {{number(predicted_{0}_bytes / {1})}} '
    '({{100 * (predicted_{0}_bytes / {0}_bytes - 1):+.1f}} %)"'
)
# Two steps that split cases by the fields in braces. The first text of "cut" goes into the names of files, the second
# into headings.
OF_A_CASE = ["cut", "{mode}-{compile}-{impl}", "{mode}, {compile}, {impl}"]
OF_A_SETTING = [
    "cut",
    "anatomy-{size}-S{context}B{batch}-{precision}",
    "{size}, context {context}, batch {batch}, {precision}",
]


def parts_of(mode: str, word: str) -> list[Any]:
    """Steps that draw the table of the parts of a model in one kind of call.

    It has a line for each part, in the order of PARTS, and a column for each value of `variant`. ANATOMY, below, adds
    this field: it says how blocks are compiled, and names the row.

    mode  the kind of call, "step" or "forward"
    word  the name of such a call in the table's title, such as "inference"
    """
    return [
        ["only", f'mode == "{mode}"'],
        [
            "unfolded",
            "parts",
            [
                *PART_FIELDS,
                {
                    "name": "own_s",
                    "label": f"Parts of one {word}, ms",
                    "of": 'number(1000.0 * total_s) + (f" / {number(1000.0 * backward_s)}" if backward_s else "")',
                },
            ],
        ],
        [
            "pivot",
            ["own_s"],
            ["name"],
            "variant",
            {
                "word": f"{mode}-parts",
                "about": "Time of the kernels that each part launches, of a step also of their backward, ms. Parts"
                " nest: scores, softmax and values are inside attention, and all down to head and loss inside forward."
                " Inside compiled blocks there are none",
                "data": ["name", "total_s", "backward_s"],
            },
        ],
    ]


TIME_GOES = [  # the blocks of the chapter on time
    {
        "lead": [
            [
                "listing",
                ANATOMY_KEYS,
                ["kernel_s", *(f"{kind}_share+" for kind in KINDS)],
                "anatomy-shares",
                "Time by kind of kernel",
                "Time of all kernels of one call, and the share of each kind: an inference, or a step of training"
                " (forward, backward, optimizer). Kinds are told by the kernels' names; on a CPU a kernel is an"
                " operator, without those that it calls",
            ],
            [
                [
                    "fields",
                    [{"name": "slowdown", "label": "profiled / clocked", "of": "profiled_s / time_s"}],
                ],
                [
                    "listing",
                    ANATOMY_KEYS,
                    [
                        "time_s",
                        "*",
                        *(f"-{kind}_share" for kind in KINDS),
                        "-held_bytes",
                        "-peak_bytes",
                        *(f"-{way}{name}_bytes" for name in MEASURED for way in ("", "predicted_")),
                    ],
                    "anatomy-clocks",
                    "Profiled against clocked",
                    "Time of one call: clocked as in the tables of models, with the gaps in which a GPU waits for its"
                    " next kernel; all kernels added up; and the wall time under the profiler. All but the first are"
                    " means of three calls",
                ],
            ],
        ]
    },
    {
        "of": [OF_A_SETTING],
        "lead": [
            parts_of("step", "step"),
            parts_of("forward", "inference"),
            [
                [
                    "unfolded",
                    "parts",
                    [
                        *PART_FIELDS,
                        {
                            "name": "matmul_s",
                            "unit": "s",
                            "label": "of it matmul kernels",
                            "shown": "ms",
                            "of": 'kinds["matmul"] if "matmul" in kinds else 0.0',
                        },
                        {
                            "name": "forward_flops",
                            "unit": "FLOP",
                            "label": "forward",
                            "shown": "GFLOP",
                            "of": "num_layers * batch * num_heads * context * context"
                            ' * (5 if name == "softmax" else 2 * d_model // num_heads)',
                        },
                    ],
                ],
                ["only", 'name in ("scores", "softmax", "values")'],
                [
                    "listing",
                    ["mode", "compile", "impl", "name"],
                    ["total_s", "matmul_s", "backward_s", "forward_flops"],
                    "softmax",
                    "Softmax against matmul inside attention",
                    "Kernel time of one call over all layers, of the parts of plain attention: scores are Q Kᵀ, scaled"
                    " and masked, values the product with V. Arithmetic of the forward: 2 B H S² D for each product, 5"
                    " B H S² for softmax, times the layers",
                    ["name", "total_s", "matmul_s", "backward_s", "forward_flops"],
                ],
            ],
            [
                ["only", "kernel_s"],
                # Replaces each case by one for each kind of kernel: its word goes into the field `kind`, its share into
                # `share`.
                ["melted", "kind", "share", {f"{kind}_share": kind for kind in KINDS}],
                ["only", "share"],
                ["joined", "mode_text", ["mode"]],  # adds `mode_text`: the word for the mode
                [
                    "fields",
                    [
                        {"name": "share", "label": "Time by kind of kernel", "shown": "%"},
                        {"name": "way", "of": 'f"{mode_text}, {variant}"'},
                        {"name": "kind"},
                    ],
                ],
                ["styled", "way", "impl"],  # gives each `way` the colour of its row
                [
                    "bars",
                    ["share"],
                    "kind",
                    "way",
                    "shares",
                    "Time by kind of kernel, %",
                    "Share of the time of all kernels in one call",
                ],
            ],
        ],
        "more": [
            [
                OF_A_CASE,
                [
                    "unfolded",
                    "kernels",
                    [
                        {"name": "name", "label": "kernel"},
                        {"name": "kind"},
                        {"name": "total_s", "unit": "s", "label": "time", "shown": "ms"},
                        {"name": "count", "label": "launches", "of": "int(count) if count == int(count) else count"},
                        {"name": "share", "shown": "%", "of": "total_s / kernel_s"},
                    ],
                ],
                [
                    "listing",
                    ["name", "kind"],
                    ["total_s", "count", "share"],
                    "kernels",
                    "Longest kernels",
                    "The {lines} kernels of one call with most time in all: time and launches in one call, and the"
                    " share of the time of all kernels",
                    ["name", "kind", "total_s", "count", "share"],
                ],
            ]
        ],
    },
]
MEMORY_GOES = [  # the blocks of the chapter on memory
    {
        "lead": [
            [
                # Adds a first phase, whose peak is the memory held before the call. Cases that were not profiled get
                # phases without peaks.
                ["with_held"],
                ["joined", "mode_text", ["mode"]],
                [
                    "unfolded",
                    "phases",
                    [
                        {
                            "name": "in_use_bytes",
                            "unit": "B",
                            "label": "Peak by phase",
                            "shown": "GiB",
                            "of": "held_bytes + peak_bytes",
                        },
                        {"name": "what", "role": "detail", "of": 'f"{mode_text}: {name}"'},
                    ],
                ],
                [
                    "pivot",
                    ["in_use_bytes"],
                    [key for key in ANATOMY_KEYS if key != "mode?"],
                    "what",
                    {
                        "word": "anatomy-peaks",
                        "about": "The most memory in use during each phase, with what was held before: weights, and in"
                        " a step the optimizer's state. An inference is a forward without gradients; before a step"
                        " there are no gradients yet",
                        "data": ["what", "in_use_bytes"],
                    },
                ],
            ],
            [
                ["only", 'mode == "step" and predicted_parameters_bytes is not None'],
                ["fields", [{"name": name, "of": DEVIATION.format(name, 2**30)} for name in MEASURED]],
                [
                    "listing",
                    ANATOMY_KEYS,
                    MEASURED,
                    "anatomy-predicted",
                    "What memory holds, GiB: measured / predicted (deviation)",
                    "GiB. Activations: what a forward leaves for its backward, and the head's gradient, made there."
                    " They are predicted for blocks in eager mode and for attention that keeps no scores: what plain"
                    " attention keeps, and what a compiler does not, is not in the prediction",
                    [f"{way}{name}_bytes" for name in MEASURED for way in ("", "predicted_")],
                ],
            ],
        ]
    },
    {
        "of": [
            OF_A_SETTING,
            # Steps come first, since False sorts before True.
            ["fields", [{"name": "later", "role": "detail", "of": 'mode != "step"'}]],
            ["ordered", "later"],
        ],
        "lead": [
            [
                OF_A_CASE,
                # A plot of the memory in use during a call; the argument is the caption.
                [
                    "memory_timeline",
                    "Memory in use after each event of the allocator, the first at 0 ms; held before are the weights"
                    " and, in a step, the optimizer's state. Time is the host's, slowed by the recording. Of many"
                    " events the extremes are drawn",
                ],
            ]
        ],
        "more": [
            [
                OF_A_CASE,
                [
                    "unfolded",
                    "allocations",
                    [
                        {"name": "where", "label": "line"},
                        {"name": "function"},
                        {"name": "bytes", "unit": "B", "label": "size of each", "shown": "MiB"},
                        {"name": "count"},
                        {"name": "at_peak", "label": "at the peak"},
                    ],
                ],
                # `lmsys.measure.memory.allocator_events` finds the line of an allocation: the innermost line of the
                # Python stack that is not in torch's code.
                [
                    "listing",
                    ["where", "function"],
                    ["bytes", "count", "at_peak"],
                    "allocations",
                    "Largest allocations",
                    "The largest allocations of one call; how many of that size the line made, and how many of them"
                    " were live when most memory was in use. Line: the innermost that is not torch's; a backward on a"
                    " GPU has none, and of compiled code none may be known",
                    ["where", "function", "bytes", "count", "at_peak"],
                ],
            ]
        ],
    },
]
# The names of parts in the order of a step, for "read_as" below: tables list them in this order. The model and
# lmsys/attention/naive.py give these names to `part`: a new part needs its name here, too. "forward", "backward"
# and "optimizer" make up a step. Those from "norms" to "head and loss" are inside of "forward"; of these, "scores",
# "softmax" and "values" are inside of "attention".
PARTS = (
    "forward,norms,projections,rotation,attention,scores,softmax,values,feed-forward,head and loss,backward,optimizer"
).split(",")
ANATOMY: Layout = {
    "place": 40,
    "words": WORDS,
    "prepare": [
        # Refuses cases in which a field of the first list is not a number, or a field of the second is not a text.
        [
            "checked",
            ["batch", "context", "d_model", "num_layers", "num_heads"],
            ["size", "precision", "mode", "compile"],
        ],
        # "read_as" sets the words for a field's values, and the order in which tables list them.
        ["read_as", "mode", [["forward", "inference"], ["step", "step"]]],
        # Captions leave these axes out: `size` stands for them.
        ["quiet", "d_model", "num_layers", "num_heads", "d_ff", "num_parameters"],
        ["joined", "impl_text", ["impl"]],  # adds `impl_text`: the word for the row
        ["labelled", {"impl": "attention", "mode": "call"}],  # new labels of two fields: the heads of their columns
        ["read_as", "name", [[name, name] for name in PARTS]],
        ["fields", [{"name": "variant", "role": "detail", "of": 'f"{compile}, {impl_text}"'}]],
        ["ordered", "size", "context", "batch", LIMIT, "precision", "mode", "compile", "impl"],
    ],
    "chapters": [
        {"title": "Where time goes", "blocks": TIME_GOES},
        {"title": "Where memory goes", "blocks": MEMORY_GOES},
    ],
}
