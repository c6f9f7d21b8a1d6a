"""The layout of the report on whole models: times, rates and memory by size and context, beside a peer's.

A *peer* is somebody else's model; a *row* is an implementation, here our model with one kernel of attention, or a peer.
`bench_model.py` declares MODEL as its `layout`; result files carry it, and `lmsys report` draws it. It is plain data:
to change or add a table or plot, edit its "lead" and "more", or the lists above MODEL, which several of its parts use;
then `python -m dev.layouts` writes it into the committed results. `lmsys/reports/layout.py` explains these keys, and
`benchmarks/layouts.py` the steps, `word` and the signs in lists of fields, such as "peak_bytes!". Other steps that draw
here:

    ["by_size", metrics, drawn]                         a table of each metric by size and context, and plots of `drawn`
    ["times_by_size"]                                   tables of times and speedups by size and context
    ["predicted", metric, expected, sections, title, about]  a table of a metric beside the field that predicts it
    ["best", of, mode, by, keys, metrics, title]        a table of the case with the most of `of` for each value of `by`
                                                        (cases with the last value of the field `mode` alone)
    ["means", lines, columns, word, title]              a table of geometric means of speedups
    ["each", item, ...]                                 the tables and plots of all items
    ["either", item, ...]                               the tables and plots of the first item that draws any
"""

from benchmarks.layouts import KEPT, WORDS, Layout

WAYS = ["precision", "compile", "checkpoint", "residual", "impl"]  # axes: how a model is run
# The same axes for a table's columns: "a~b" is a, unless all cases have b of it (`View.chosen`).
SHOWN_WAYS = ["precision~", "compile~", "checkpoint~none", "residual~wide", "impl~"]
# Fields of a record that make a model's shape.
MODEL_SHAPE = ["d_model", "d_ff", "num_layers", "num_heads", "num_parameters"]
OF_A_STEP = ["tokens_per_s", "mfu", "total_bytes", "peak_bytes"]  # metrics that the page shows first
DRAWN = ["mfu", "matmul_ceiling_fraction", "total_bytes"]  # metrics that are plotted against the context
IN_ALL = "Memory in all: weights, gradients and optimizer state live before, and the peak above them"
# Steps for a table of our cases beside a peer, which is run in the fastest way; there is no table without a peer.
BESIDE = [
    # Keeps our cases, each with `speedup`, `beside` (the peer's case in the fastest of these ways), `theirs` and
    # `peers` (the peer's name, without and with a capital), `their_label`, and `their_about` (what `speedup` means).
    ["beside_fastest", ["compile", "checkpoint", "residual"]],
    ["labelled", {"speedup": "speedup", "tokens_per_s": "rate", "mfu": "MFU", "total_bytes": "memory"}],
    ["ordered", "size", "batch"],
    [
        "fields",
        [
            *(
                {
                    "name": f"peer_{name}",
                    "label": f"{{peers}} {label}",
                    "of": f'ended(beside["outcome"]) or beside["{name}"]',
                    **units,
                }
                for name, label, units in (
                    ("tokens_per_s", "rate", {"unit": "tokens/s"}),
                    ("mfu", "MFU", {"shown": "%"}),
                    ("total_bytes", "memory", {"unit": "B", "shown": "GiB"}),
                )
            ),
            {
                "name": "peer_compile",
                "label": "{peers} run as",
                "of": 'beside["compile"] if beside["time_s"] else ""',
            },
            {
                "name": "memory_ratio",
                "label": "memory over {peers}'s",
                "shown": "×",
                "of": "total_bytes / peer_total_bytes",
            },
            *({"name": name, "role": "detail"} for name in ("theirs", "their_label", "their_about")),
        ],
    ],
    [
        "listing",
        ["size", "batch"],
        [
            "speedup",
            "peer_compile",
            "tokens_per_s",
            "peer_tokens_per_s",
            "mfu",
            "peer_mfu",
            "total_bytes",
            "peer_total_bytes",
            "memory_ratio",
        ],
        "beside-{theirs}",
        "Ours beside {their_label}",
        "Ours beside {their_label}, which stands here by the fastest of the ways in which it was run. {their_about}. A"
        f" narrow residual stream is held in the dtype of matmuls, a wide one in float32. {IN_ALL}",
    ],
]
ALL_CASES = ["all", "All cases that the models have"]  # the arguments `word` and `title` of "listing"
# Steps for a table with a line for each case.
LISTED = [
    ["only", 'outcome != "unsupported"'],
    ["ordered", "size", "batch"],
    [
        "either",
        [
            ["if_varies", "checkpoint"],
            # Speedups over the level "none" of checkpointing; of cases not sampled together, ratios of their medians.
            ["over", "none", "checkpoint", {"medians": True}],
            ["listing", ["size", "batch", "impl"], ["time_s", "speedup", "*"], *ALL_CASES],
        ],
        ["listing", ["size", "batch", "impl"], ["time_s", "*"], *ALL_CASES],
    ],
]
# A step: a table of memory as measured and as predicted. In the section "fits" the table also tells which cases were
# predicted to fit.
PREDICTED_MEMORY = [
    "predicted",
    "total_bytes",
    "predicted_bytes",
    ["fits"],
    "Memory measured and predicted",
    "Memory of a step in all (live before, and the peak above), as measured and as the shapes predict it",
]
MODES = ["cut", "{mode}", "{mode}"]  # splits cases by mode, in file names and in headings
# Splits cases by section and vocabulary; texts in brackets are left out where the field in them does not vary. Adds
# `one_shape`: True if all cases have one size, context and batch, and differ in checkpointing or residual stream.
PART = [
    ["cut", "model-{section}[-V{vocab_size}]", "[vocabulary {vocab_size}]"],
    ["one_shape", "one_shape", ["size", "context", "batch"], ["checkpoint", "residual"]],
]
# An expression: true for cases that are drawn in one table, since a table for each way to run a model would have one
# line.
TOGETHER = '(section == "peers" or one_shape)'
MODEL: Layout = {
    "place": 20,
    "words": WORDS,
    "fastest": {  # the question that the page answers first: `lmsys.reports.contest.Question` explains its keys
        "word": "step",
        "title": "Fastest training step",
        "keys": {"size": "model", "precision": "precision", "residual": "stream", "checkpoint": "checkpointing"},
        "values": {
            "residual": 'residual or "wide"',
            "checkpoint": 'checkpoint or "none"',
            "compile": 'compile or "eager"',
        },
        "bases": ["llama_tuned", "llama", "sdpa", "sdpa_flash"],
        "contends": 'mode == "step"',
        "about": " Each row counts by the fastest of the ways in which it was run, which its name tells. A narrow"
        " residual stream is held in the dtype of matmuls, a wide one in float32. Only steps of one kind are compared,"
        " and only where somebody else's are among them.",
        "kind": "attention",
        "way": "compile",
        "told": ["residual"],
        "mfu": True,
    },
    "prepare": [
        *KEPT,
        # Refuses cases in which a field of the first list is not a number, or a field of the second is not a text.
        ["checked", ["batch", "context", "vocab_size"], ["section", "size", *WAYS, "mode"]],
        ["quiet", *MODEL_SHAPE],  # captions leave these axes out: `size` stands for them
        [
            "labelled",
            {
                "impl": "attention",
                "vocab_size": "vocabulary",
                "warmup_steps": "warm-up",
                "mean_s": "Time, mean ± std",
            },
        ],
        [
            "fields",  # older files do not have this field
            [
                {
                    "name": "total_bytes",
                    "unit": "B",
                    "label": "Memory in all",
                    "about": IN_ALL,
                    "shown": "GiB",
                    "of": "held_bytes + peak_bytes",
                }
            ],
        ],
        ["ordered", "section", "mode", *WAYS, "num_parameters", "size", "context", "batch", "warmup_steps"],
    ],
    "chapters": [
        {
            "title": "Model: {section}",
            "blocks": [
                {
                    "title": "",
                    "lead": [
                        [
                            *PART,
                            ["only", 'section != "warmup"'],
                            [
                                "each",
                                [
                                    [
                                        "each",
                                        # The last mode is "step", if steps were run.
                                        [["only", f"not {TOGETHER}"], ["last_of", "mode"], *BESIDE],
                                        [
                                            ["only", f"not {TOGETHER}"],
                                            [
                                                "best",
                                                "tokens_per_s",
                                                "mode",
                                                "size",
                                                ["size", *SHOWN_WAYS, "batch", "context"],
                                                ["time_s!", *(f"{name}!" for name in OF_A_STEP)],
                                                "Most tokens per second of each size: {mode}",
                                            ],
                                        ],
                                    ]
                                ],
                                [
                                    ["joined", "way", ["precision", "impl?"]],  # adds `way`: words for these fields
                                    ["over", "eager", "compile", {"medians": True}],
                                    ["only", 'compile == "compiled"'],
                                    [
                                        "means",
                                        "mode",
                                        "way",
                                        "summary",
                                        "Speedup of compiled over eager, geometric mean · {section}",
                                    ],
                                ],
                            ],
                        ]
                    ],
                },
                {
                    "of": [["only", 'section == "warmup"'], *PART],  # the warm-up study, which no other table shows
                    "lead": [
                        [
                            ["each_way"],  # splits cases by how models were run
                            [
                                "pivot",
                                ["mean_s"],
                                ["size", "context", "warmup_steps"],
                                "mode",
                                {"about": "Mean ± standard deviation of the time after that warm-up"},
                            ],
                        ]
                    ],
                },
                {
                    "of": [["only", 'section != "warmup"'], *PART],
                    "blocks": [
                        {
                            "title": "Step by phase{heading}",
                            "lead": [
                                [
                                    ["only", 'mode in ("train_forward", "backward", "optimizer", "step")'],
                                    [
                                        "fields",
                                        [{"name": "variant", "role": "detail", "of": 'f"{precision}, {compile}"'}],
                                    ],
                                    ["styled", "variant", "precision"],
                                    [
                                        "cut",
                                        "{impl}-{size}-S{context}-B{batch}",
                                        "{size}, context {context}, batch {batch}, {impl}",
                                        True,  # the text for file names stands at their end
                                    ],
                                    [
                                        "bars",
                                        ["time_s"],
                                        "mode",
                                        "variant",
                                        "phases",
                                        "Time of a step by phase",
                                        "Median times of the phases, and of the whole step timed as one, ms",
                                    ],
                                ]
                            ],
                        },
                        {
                            "of": [["only", TOGETHER], MODES],
                            "lead": [["either", BESIDE, LISTED]],
                            # LISTED is drawn above if BESIDE draws nothing, and here if BESIDE draws something.
                            "more": [["if_drawn", BESIDE, LISTED]],
                        },
                        {
                            "of": [["only", f'not {TOGETHER} and section == "fits"'], MODES],
                            "lead": [PREDICTED_MEMORY, ["by_size", ["total_bytes!", "peak_bytes!"], DRAWN]],
                            "more": [
                                BESIDE,
                                ["times_by_size"],
                                ["by_size", ["*", "-time_s", "-total_bytes", "-peak_bytes"], DRAWN],
                            ],
                        },
                        {
                            "of": [
                                ["only", f'not {TOGETHER} and section != "fits"'],
                                ["if_varies", "mode", False],  # parts with one mode; parts with several are below
                                MODES,
                            ],
                            "lead": [BESIDE, ["times_by_size"], ["by_size", [f"{name}!" for name in OF_A_STEP], DRAWN]],
                            "more": [
                                PREDICTED_MEMORY,
                                ["by_size", ["*", "-time_s", *(f"-{name}" for name in OF_A_STEP)], DRAWN],
                            ],
                        },
                        {
                            "of": [["only", f'not {TOGETHER} and section != "fits"'], ["if_varies", "mode"], MODES],
                            "lead": [BESIDE, ["times_by_size"]],
                            "more": [PREDICTED_MEMORY, ["by_size", ["*", "-time_s"], DRAWN]],
                        },
                    ],
                },
            ],
        },
        {
            "title": "Model: all that were run",
            "blocks": [
                {
                    "lead": [
                        [
                            ["one_of_each", ["size", "vocab_size"]],  # one case for each size and vocabulary
                            [
                                "labelled",
                                {"num_layers": "layers", "num_heads": "heads", "num_parameters": "parameters"},
                            ],
                            ["ordered", "num_parameters"],
                            [
                                "listing",
                                ["size", "vocab_size", *MODEL_SHAPE],
                                [],
                                "model-sizes",
                                "Sizes",
                                "The models that were run",
                            ],
                        ],
                        [
                            ["ordered", *WAYS],
                            # A table of how cases ended, for each combination of values of these fields.
                            ["endings", *SHOWN_WAYS, {"word": "model-outcomes", "title": "How the cases ended"}],
                        ],
                    ]
                }
            ],
        },
    ],
}
