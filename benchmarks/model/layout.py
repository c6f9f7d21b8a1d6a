"""The report on whole models: times, rates and memory by size and context, beside somebody else's model.

`bench_model.py` declares MODEL as its `layout`. `lmsys.reports.layout` explains the keys of a layout, and the functions
of `lmsys.reports.steps` and `lmsys.reports.special` its steps. Lists that several parts of MODEL use have names here.
"""

from benchmarks.layouts import KEPT, WORDS, Layout

WAYS = ["precision", "compile", "checkpoint", "residual", "impl"]  # axes: how a model is run
# The same axes for a table's columns: "a~b" is a, unless all cases have b of it (`View.chosen`).
SHOWN_WAYS = ["precision~", "compile~", "checkpoint~none", "residual~wide", "impl~"]
MODEL_SHAPE = ["d_model", "d_ff", "num_layers", "num_heads", "num_parameters"]
OF_A_STEP = ["tokens_per_s", "mfu", "total_bytes", "peak_bytes"]  # metrics that the page shows first
DRAWN = ["mfu", "matmul_ceiling_fraction", "total_bytes"]  # metrics that are drawn against context
IN_ALL = "Memory in all: weights, gradients and optimizer state live before, and the peak above them"
# A table of our cases beside somebody else's model, which is run in the fastest way; none without such a model.
BESIDE = [
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
ALL_CASES = ["all", "All cases that the models have"]
# A table with a line for each case.
LISTED = [
    ["only", 'outcome != "unsupported"'],
    ["ordered", "size", "batch"],
    [
        "either",
        [
            ["if_varies", "checkpoint"],
            ["over", "none", "checkpoint", {"medians": True}],
            ["listing", ["size", "batch", "impl"], ["time_s", "speedup", "*"], *ALL_CASES],
        ],
        ["listing", ["size", "batch", "impl"], ["time_s", "*"], *ALL_CASES],
    ],
]
PREDICTED_MEMORY = [
    "predicted",
    "total_bytes",
    "predicted_bytes",
    ["fits"],
    "Memory measured and predicted",
    "Memory of a step in all (live before, and the peak above), as measured and as the shapes predict it",
]
TIMES = ["times_by_size"]
MODES = ["cut", "{mode}", "{mode}"]
# Splits cases by section and vocabulary. `one_shape`: True if all have one shape, run in several ways.
PART = [
    ["cut", "model-{section}[-V{vocab_size}]", "[vocabulary {vocab_size}]"],
    ["one_shape", "one_shape", ["size", "context", "batch"], ["checkpoint", "residual"]],
]
# An expression: true for cases that have one table together, as a table of each way would have one line.
TOGETHER = '(section == "peers" or one_shape)'
MODEL: Layout = {
    "place": 20,
    "words": WORDS,
    "fastest": {
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
        ["checked", ["batch", "context", "vocab_size"], ["section", "size", *WAYS, "mode"]],
        ["quiet", *MODEL_SHAPE],
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
                                    ["joined", "way", ["precision", "impl?"]],
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
                    "of": [["only", 'section == "warmup"'], *PART],  # steps of warm-up, which no other table shows
                    "lead": [
                        [
                            ["each_way"],
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
                                        True,
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
                            "more": [["if_drawn", BESIDE, LISTED]],
                        },
                        {
                            "of": [["only", f'not {TOGETHER} and section == "fits"'], MODES],
                            "lead": [PREDICTED_MEMORY, ["by_size", ["total_bytes!", "peak_bytes!"], DRAWN]],
                            "more": [
                                BESIDE,
                                TIMES,
                                ["by_size", ["*", "-time_s", "-total_bytes", "-peak_bytes"], DRAWN],
                            ],
                        },
                        {
                            "of": [
                                ["only", f'not {TOGETHER} and section != "fits"'],
                                ["if_varies", "mode", False],
                                MODES,
                            ],
                            "lead": [BESIDE, TIMES, ["by_size", [f"{name}!" for name in OF_A_STEP], DRAWN]],
                            "more": [
                                PREDICTED_MEMORY,
                                ["by_size", ["*", "-time_s", *(f"-{name}" for name in OF_A_STEP)], DRAWN],
                            ],
                        },
                        {
                            "of": [["only", f'not {TOGETHER} and section != "fits"'], ["if_varies", "mode"], MODES],
                            "lead": [BESIDE, TIMES],
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
                            ["one_of_each", ["size", "vocab_size"]],
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
                            ["endings", *SHOWN_WAYS, {"word": "model-outcomes", "title": "How the cases ended"}],
                        ],
                    ]
                }
            ],
        },
    ],
}
