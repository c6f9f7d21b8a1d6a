"""The layout of the report on data parallelism: step times, cost of communication, memory, ours beside torch's.

`bench_data_parallel.py` declares DATA_PARALLEL as its `layout`; result files carry it, and `lmsys report` draws it. It
is plain data: to change or add a table or plot, edit its "lead" and "more"; then `python -m dev.layouts` writes it into
the committed results. `lmsys/reports/layout.py` explains these keys, and `benchmarks/layouts.py` the steps, `word` and
the signs in lists of fields, such as "peak_bytes!". A *row* is a strategy with its options.
"""

from benchmarks.layouts import COMPILED, KEPT, LIMIT, WORDS, Layout

SIZES = [  # fields of the table of memory; the table of steps leaves them out
    "init_bytes!",
    "before_step_peak_bytes!",
    "after_step_peak_bytes!",
    "parameters_bytes!",
    "gradients_bytes!",
    "optimizer_bytes!",
    "activations_bytes!",
    "optimizer_fraction!",
    "peak_bytes!",
]
# The first columns of tables.
RANK_KEYS = ["batch", "world_size", "impl"]
DATA_PARALLEL: Layout = {
    "place": 70,
    "words": WORDS,
    "fastest": {  # the question that the page answers first: `lmsys.reports.contest.Question` explains its keys
        "word": "data-parallel",
        "title": "Fastest data parallelism",
        "keys": {
            "size": "model",
            "precision": "precision",
            "residual": "stream",
            "compile": "run",
            "world_size": "ranks",
        },
        "values": {
            "residual": 'residual or "wide"',
            "checkpoint": 'checkpoint or "none"',
            "compile": 'compile or "eager"',
        },
        "bases": ["torch_ddp_tuned", "torch_ddp", "torch_fsdp2", "torch_fsdp2_zero2", "torch_zero1", "naive"],
        "contends": 'strategy != "none" and world_size not in (None, 1) and comm_dtype in (None, "float32") and'
        ' optimizer != "muon"',
        "kind": "strategy",
    },
    "prepare": [
        *KEPT,
        ["defaulted", "optimizer", "adamw"],  # older files lack this axis, too
        # Refuses cases in which a field of the first list is not a number, or a field of the second is not a text.
        ["checked", ["context", "batch", "world_size"], ["section", "size", "precision", "strategy"]],
        # Adds `strategy_all_reduce_model`, a trait of the strategy. If it is False, the times of an all-reduce predict
        # nothing for its rows; older files have predictions for such rows, too, which the next step drops.
        ["traits", "strategy", "all_reduce_model"],
        [
            "computed",
            {
                "compile": 'compile or "eager"',
                "predicted_exposed_s": "None if strategy_all_reduce_model is False else predicted_exposed_s",
            },
        ],
        [
            "fields",
            [
                {
                    "name": "predicted_bytes",
                    "unit": "B",
                    "label": "predicted without activations",
                    "role": "detail",
                    "shown": "GiB",
                    "of": "predicted_parameters_bytes + predicted_gradients_bytes + predicted_optimizer_bytes",
                },
                *COMPILED,  # adds `way` and `how`: how blocks are compiled, in file names and in headings
            ],
        ],
        ["row_labels", "none"],  # adds `called`: strategy and bucket size, and checkpointing unless it is "none"
        ["labelled", {"impl": "strategy", "mean_s": "step, mean ± std"}],
        ["styled", "impl", "strategy", "called"],  # each `impl` has its strategy's colour; legends say `called`
        ["ordered", "section", "num_parameters", "precision", "context", "compile", "batch", "world_size", "impl"],
    ],
    "chapters": [
        {
            "title": "Data parallel: {section}",
            "blocks": [
                {
                    "title": "Beside torch's own",
                    "lead": [
                        [
                            [
                                "only",
                                'not sharded_optimizer and comm_dtype in (None, "float32") and world_size > 1 and'
                                ' optimizer != "muon"',
                            ],
                            # A table of the speed of each of our strategies over those that its trait `rivals` names:
                            # strategies of torch, or `naive`. It has a line for each combination of values of the first
                            # list. The second list has the beginning and the end of a line's name; then come `word` and
                            # the title.
                            [
                                "rivals",
                                [
                                    "size",
                                    "batch",
                                    "context",
                                    "precision",
                                    "compile",
                                    "world_size",
                                    "checkpoint",
                                    "residual",
                                    LIMIT,
                                ],
                                ["{size} b{batch} s{context}, {precision}, ", "{world_size} ranks{how}"],
                                "data-parallel-{section}-peers",
                                "Speed of ours, × of the row beside it · {section}",
                            ],
                        ]
                    ],
                },
                {
                    "of": [
                        # Splits cases by the fields in braces: texts for file names, and for headings.
                        [
                            "cut",
                            "data-parallel-{section}-{size}-S{context}-{precision}{way}",
                            "{size}, context {context}, {precision}{how}",
                        ],
                        # Adds the text of this expression to the end of captions.
                        [
                            "said_also",
                            '"batch is that of each rank" + ("; memory is that of a step launched call by call, before'
                            ' one is recorded" if compile == "graphed" else "")',
                        ],
                    ],
                    "lead": [
                        [
                            ["last_of", "world_size"],  # the cases on the most ranks
                            ["if_varies", "batch"],
                            ["pivot", ["time_s"], ["batch"], {"word": "by-batch"}],
                        ],
                        [
                            "listing",
                            RANK_KEYS,
                            ["mean_s", "*", "-time_s", *(f"-{name[:-1]}" for name in SIZES)],  # without the "!"
                            "step",
                            "Step by strategy",
                        ],
                        [["last_of", "world_size"], ["bars", ["tokens_per_s"], "batch", {"word": "rate"}]],
                        [["last_of", "world_size"], ["bars", ["exposed_s"], "batch", {"word": "exposed"}]],
                    ],
                    "more": [
                        [
                            ["only", "peak_bytes"],
                            ["listing", RANK_KEYS, [*SIZES, "predicted_bytes"], "memory", "Memory of a rank"],
                        ],
                        [
                            # Replaces each case by one for each entry {row: word} of its field `held_by`, and one for
                            # its own row. The row goes into the field `other`, the word into `how`.
                            ["pairs", "held_by", "other", "how"],
                            [
                                "fields",
                                [
                                    {"name": "other", "label": "beside"},
                                    {
                                        "name": "held",
                                        "label": "Held by",
                                        "of": '"the same bits" if how == "bits" else'
                                        ' "not known" if how == "unknown" else how',
                                    },
                                ],
                            ],
                            [
                                "pivot",
                                ["held"],
                                RANK_KEYS,
                                "other",
                                {
                                    "word": "pairs",
                                    "about": "What holds two strategies together after the steps of one pass: the same"
                                    " bits, in the rows of the weights that were looked at, or the tolerance, by which"
                                    " each of them is held to plain steps in float64",
                                },
                            ],
                        ],
                        [
                            ["last_of", "world_size"],
                            ["only", "peak_bytes"],
                            ["picked", -1, "", "batch {batch}"],  # the last batch; arguments 2 and 3 as of "cut"
                            # Replaces each case by one for each of these fields: its word goes into the field `what`,
                            # its value into `bytes`.
                            [
                                "melted",
                                "what",
                                "bytes",
                                {
                                    "parameters_bytes": "parameters",
                                    "gradients_bytes": "gradients",
                                    "optimizer_bytes": "optimizer",
                                    "activations_bytes": "activations",
                                    "peak_bytes": "peak",
                                },
                            ],
                            [
                                "fields",
                                [
                                    {"name": "what"},
                                    {"name": "bytes", "unit": "B", "label": "Memory of a rank", "shown": "GiB"},
                                ],
                            ],
                            [
                                "bars",
                                ["bytes"],
                                "what",
                                {
                                    "word": "memory",
                                    "head": "Memory of a rank by kind",
                                    "about": "Parameters, gradients and optimizer state after a step and activations"
                                    " after a forward; and a step's peak",
                                },
                            ],
                        ],
                        [
                            ["only", "scaling_efficiency and world_size > 1"],
                            ["picked", -1, "", "batch {batch}"],
                            # Adds all cases a second time, with one rank and 100 %: the points where lines begin.
                            ["repeated", {"world_size": 1, "scaling_efficiency": 1.0}],
                            ["lines", ["scaling_efficiency"], "world_size", {"word": "scaling"}],
                        ],
                        [
                            ["last_of", "world_size"],
                            # Draws when a step computes and when it communicates; the argument is the caption.
                            [
                                "overlap",
                                "From a profiler's trace of one step on rank 0: above what computes, below what"
                                " communicates",
                            ],
                        ],
                    ],
                },
            ],
        }
    ],
}
