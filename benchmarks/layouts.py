"""The layouts of four benchmarks' reports, words and steps that several layouts share, and a legend for all layouts.

A *layout* is plain data that says which tables and plots `lmsys report` makes of a benchmark's records; it travels with
the results. A benchmark declares it as `layout`: `bench_loss.py` LOSS, `bench_tokenizer.py` TOKENIZER,
`bench_collectives.py` COLLECTIVES, `bench_precision.py` PRECISION. The layouts of other benchmarks are in their
folders, such as `model/layout.py`, and import the words and steps from here. `lmsys.reports.layout` explains the keys
of a layout: "of" are steps for a block of the page, "lead" and "more" are lists of tables and plots, of which the page
shows the first ones of "lead" and folds the others.

A step is a list: its first word names the step, and the rest are the arguments of the function that
`lmsys.reports.steps.STEPS` has under this name; a mapping at the end holds keyword arguments. Each table or plot is a
list of steps, of which the last draws it. These draw in several layouts:

    ["listing", keys, metrics, word, title, about, data]  a table with a line for each case
    ["pivot", metrics, lines, columns, inside, word]      a table of each metric: a line for each combination of values
                                                          of the fields `lines`; a column for each value of `columns`,
                                                          by default the rows' names; in a cell the values of `inside`
    ["over_bases", keys, title]                           a listing of all metrics, with speedups over each baseline
    ["bars", metrics, axis, by, word, head, about]        a plot of each metric: a group of bars for each value of
                                                          `axis`, and in it a bar for each value of `by`
    ["lines", metrics, axis]                              a plot of each metric against the axis

`word` ends the name of the table's or plot's file, and `data` are the fields of its CSV. In lists of fields
(`View.chosen`):

    "a?"  the field a, if it varies
    "a!"  a, if any case has a value of it
    "a+"  a, if any case has a value of it other than 0 and empty
    "a|"  a, if no field was chosen before it
    "*"   all metrics that the list does not name
    "-a"  leaves a out of "*"

Names in braces stand for values of the cases' fields. The texts of "only" and "where", and those under "of" in
declarations of fields, are expressions of `lmsys.reports.expressions`. Change captions (`title`, `label`, `about`)
freely. After a change of any layout, `python -m dev.layouts reports/results/*.json.gz` writes it into the committed
results. A section is a grid of a sweep (`sweeps.py`); a new one gets its title in WORDS.
"""

from typing import Any

Layout = dict[str, Any]
WORDS = {  # by field: the words that a report shows for values, in the order in which tables list the values
    "section": {
        "corpus": "All of the text",
        "levels": "Steps by what blocks keep",
        "8b": "8 billion parameters, and smaller models",
        "large": "other large models, and levels of checkpointing",
        "default": "Everyday sizes",
        "tokens16k": "16,384 tokens, by length",
        "dtypes": "By dtype",
        "leaderboard": "Leaderboard workload",
        "flash": "FlashAttention against naive, head dimension by length",
        "eager_compiled": "Eager against compiled, head dimension by length",
        "by_length": "By sequence length",
        "tiers": "Rectangular tiers, Q:K",
        "documents": "Documents packed into a sequence",
        "window": "Sliding window",
        "grouped": "Grouped key and value heads",
        "decode": "Decoding: few queries, a long cache",
        "peers": "Beside Hugging Face Llama",
        "sizes": "Sizes",
        "warmup": "Warm-up study",
        "fits": "What fits a card",
        "vocabularies": "By vocabulary",
        "buckets": "By batch and size of buckets",
        "sharded": "Sharded against unsharded optimizer",
        "narrow": "Communication in lower precision",
        "scaling": "Scaling by number of ranks",
        "matrix": "Matrix of attention rows and strategies",
        "reproducible": "The same weights, bit for bit, on any number of ranks",
        "smoke": "Smoke test",
    },
    "mode": {
        "forward": "Forward (inference)",
        "train_forward": "Forward (training)",
        "backward": "Backward",
        "optimizer": "Optimizer",
        "step": "Whole step",
    },
    # Sizes are shown as they are: this entry only sets their order.
    "size": {name: name for name in ("tiny", "small", "medium", "large", "xl", "2.7b", "10b", "1b", "3b", "8b")},
}
# Declarations for the step "fields": `way` says in names of files how blocks are compiled, `how` says so in headings.
COMPILED = [
    {"name": "way", "role": "detail", "of": '"" if compile == "eager" else f"-{compile}"'},
    {
        "name": "how",
        "role": "detail",
        "of": '"" if compile == "eager" else ", as one CUDA graph" if compile == "graphed" else'
        ' ", fused blocks as one CUDA graph" if compile == "fused" else f", blocks {compile}"',
    },
]
# Steps that fill in two fields that older result files lack. Each step names the field, the value that is filled in,
# and the values that tables list after it.
KEPT = [
    ["defaulted", "checkpoint", "none", ["matmuls", "attention", "whole"]],
    ["defaulted", "residual", "wide"],
]
LIMIT = "memory_limit_bytes"  # a field: the limit under which a case ran
# In all layouts, "checked" refuses cases in which a field of the first list is not a number, or a field of the second
# is not a text.
LOSS: Layout = {
    "place": 30,  # the page has the benchmarks in the order of these numbers
    "words": WORDS,
    "prepare": [
        ["checked", ["tokens", "d_model", "vocab_size"], ["section", "precision"]],
        ["labelled", {"impl": "implementation", "vocab_size": "vocabulary"}],
        ["ordered", "section", "precision", "tokens", "d_model", "vocab_size", "impl"],
    ],
    "chapters": [
        {
            "title": "Head and loss",
            "blocks": [
                {
                    "of": [
                        # Splits cases by the fields in braces: a text for file names, and one for headings.
                        [
                            "cut",
                            "loss-{section}-{precision}-N{tokens}-M{d_model}",
                            "{section}, {precision}, {tokens} tokens, d_model {d_model}",
                        ]
                    ],
                    "lead": [
                        # "shares": the table also has peak memory as a share of each baseline's.
                        ["over_bases", ["vocab_size", "impl"], "Time, speed and peak memory", {"shares": True}],
                        ["bars", ["time_s", "peak_bytes"], "vocab_size"],
                    ],
                },
                {"lead": [["same_bits", "loss-same-bits"]]},  # a table: which rows give the same bits again
            ],
        }
    ],
}
TOKENIZER: Layout = {
    "place": 90,
    "words": WORDS,
    "prepare": [
        ["checked", ["vocab_size", "processes"], ["section", "task"]],
        ["read_as", "task", [["train", "training"], ["encode", "encoding"]]],
        ["labelled", {"impl": "implementation"}],
        ["ordered", "section", "vocab_size", "text_bytes", "task", "impl"],
    ],
    "chapters": [
        {
            "title": "Tokenizers",
            "blocks": [
                {
                    "of": [
                        [
                            "cut",
                            "tokenizer-{section}-V{vocab_size}-{text_bytes}B",
                            "{section}, vocabulary {vocab_size}, {text_bytes}",
                        ]
                    ],
                    "lead": [
                        # "same": a case is compared with the baseline's case of the same task. "otherwise": where no
                        # baseline was timed, a case is compared with that of a peer, somebody else's row.
                        [
                            "over_bases",
                            ["task", "impl", "processes"],
                            "Time, rate, speed and memory",
                            {"same": ["task"], "otherwise": "peer"},
                        ],
                        ["bars", ["bytes_per_s"], "task", {"word": "rate"}],
                    ],
                }
            ],
        }
    ],
}
COLLECTIVES: Layout = {
    "place": 60,
    "words": WORDS,
    "prepare": [
        ["checked", ["megabytes", "world_size"], ["section", "backend"]],
        ["labelled", {"impl": "operation"}],
        # The words for sizes, by an expression; [] sorts them by the field itself.
        ["worded", "megabytes", [], 'f"{megabytes:,} MB"'],
        ["ordered", "section", "backend", "impl", "world_size", "megabytes"],
    ],
    "chapters": [
        {
            "title": "Collectives",
            "blocks": [
                {
                    "of": [["cut", "collectives-{section}-{backend}", "{section}, {backend}"]],
                    "lead": [
                        ["pivot", ["time_s"], ["impl", "world_size"], "megabytes"],
                        [
                            # One case for each operation and number of ranks, with `latency_s` and `bytes_per_s`.
                            ["latency_and_bandwidth", ["impl", "world_size"]],
                            [
                                "fields",
                                [
                                    {"name": "latency_s", "unit": "s", "label": "o", "shown": "µs"},
                                    {"name": "bytes_per_s", "unit": "B/s", "label": "w", "shown": "GB/s"},
                                ],
                            ],
                            ["silent", "megabytes"],  # captions leave the size out: the fit is over all of them
                            [
                                "listing",
                                ["impl", "world_size"],
                                ["latency_s", "bytes_per_s"],
                                "fit",
                                "Fitted latency and bandwidth",
                                "o and w of t = o + bytes / w, least squares of relative errors over the sizes that"
                                " were timed",
                            ],
                        ],
                        [
                            ["cut", "W{world_size}", "{world_size} ranks"],
                            [
                                "lines",
                                ["algorithm_bytes_per_s"],
                                "megabytes",
                                {"word": "bandwidth", "xlabel": "message, MB"},
                            ],
                        ],
                    ],
                    "more": [
                        [
                            ["only", "time_s is not None"],
                            ["listing", ["impl", "world_size", "megabytes"], ["*"], "rates", "Bandwidth by size"],
                        ]
                    ],
                }
            ],
        }
    ],
}
PRECISION: Layout = {
    "place": 50,
    "words": WORDS,
    "prepare": [
        ["read_as", "impl", [["float32", "float32"], ["float16", "float16"], ["bfloat16", "bfloat16"]]],
        ["unstyled"],  # no colours: the values of `impl` are dtypes here, and not rows of a table, which have colours
        ["named", "precision"],  # goes into file names
        ["ordered", "impl"],
    ],
    "chapters": [
        {
            "title": "Mixed precision",
            "blocks": [
                {
                    "lead": [
                        [
                            ["only", "sums"],  # an expression: the cases that have a field `sums`
                            [
                                "fields",
                                [
                                    {"name": "added", "role": "detail", "of": 'f"{addend:g} added {times:,} times"'},
                                    {"name": "exact", "role": "detail", "of": 'f"{addend * times:g}"'},
                                ],
                            ],
                            [  # replaces a case by one for each entry of its list `sums`; entries have these fields
                                "unfolded",
                                "sums",
                                [
                                    {"name": "accumulator", "label": "sum"},
                                    {"name": "addend"},
                                    {"name": "result"},
                                    {"name": "error"},
                                ],
                            ],
                            ["one_of_each", ["accumulator", "addend", "result", "error"]],
                            [
                                "fields",
                                [
                                    {"name": "sum", "label": "result", "of": 'f"{result:.5f}"'},
                                    {"name": "off", "label": "error", "of": 'f"{error:+.1e}"'},
                                ],
                            ],
                            [
                                "listing",
                                ["accumulator", "addend"],
                                ["sum", "off"],
                                "accumulation",
                                "{added}",
                                "The running sum and the addend, by dtype; the sum is {exact} without rounding. What"
                                " the addend lost when it was rounded no accumulator brings back; a sum that is itself"
                                " rounded after each step loses far more",
                                ["accumulator", "addend", "result", "error"],
                            ],
                        ],
                        [
                            [
                                "unfolded",
                                "tensors",
                                [
                                    {"name": "name", "label": "tensor"},
                                    {"name": "dtype", "label": "Dtypes under autocast"},
                                ],
                            ],
                            ["labelled", {"impl": "autocast to"}],
                            [
                                "pivot",
                                ["dtype"],
                                ["name"],
                                {
                                    "word": "autocast",
                                    "about": "Tensors of one training step of a model of one block, and the dtype that"
                                    " each has under autocast",
                                    "data": ["name", "dtype"],
                                },
                            ],
                        ],
                    ]
                }
            ],
        }
    ],
}
