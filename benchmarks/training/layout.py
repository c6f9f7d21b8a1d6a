"""The report on whole trainings, for each attention row and data-parallel strategy: speed, memory, loss curves.

This file is plain data. `bench_training.py` declares TRAINING as its `layout`, and `lmsys.reports.layout` draws it. Add
a table or a plot to "lead", which the page shows first, or to "more"; then `python -m dev.layouts` writes the layout
into the committed results. `benchmarks/layouts.py` is the legend of all layouts. A *step* is a list: the name of a
function, and its arguments. A block has three keys: its steps "of" make views, which are some cases each; "lead" and
"more" are tables and plots of such a view. Each of these is a step, or a list of steps of which the last one draws.

The first arguments of the steps that are used here:
    checked               fields that must be numbers, fields that must be texts
    cut                   a template for file names, a template for headings: the view is cut into one part for each
                          combination of the values of the fields in braces
    styled                the field whose values get colours and markers; the field that names in each case the row that
                          has these, by default the same field; the field whose values the legend shows instead
    ordered               fields by which cases are sorted
    beside_baseline       the axis that the baseline is on, the axes on which compared cases agree; the baseline, if it
                          is not the one that the axis's table marks
    pivot                 metrics, a table each; fields of the lines, field of the columns; more by keyword
    bars                  metrics, a plot each; field of the groups, field of the bars; the end of the file name
    lines                 metrics, a plot each; field of the x axis, field of the lines; the end of the file name
    points                fields that get a point's place and height; fields that hold the heights and the places
    one_of_each           fields: one case is kept of each combination of their values; a field: the case with its
                          greatest value is kept, by default the first case
    listing               fields of the first columns, metrics, the end of the file name, the title
"""

from benchmarks.layouts import COMPILED, WORDS, Layout

SAME = ["attention", "comparison"]  # fields that a case has in common with the case that it is compared with
TRAINING: Layout = {
    "place": 100,  # the page has the benchmarks in ascending order of this number
    "words": WORDS,
    "prepare": [
        # The argument of this step is an expression, so the text has a second pair of quotes.
        ["said_also", '"one process (none) accumulates the batches of all ranks; cases run one after another"'],
        [
            "checked",
            ["context", "batch", "num_ranks", "train_tokens", "val_tokens", "epochs"],
            ["section", "size", "attention", "strategy", "row", "precision", "compile"],
        ],
        # `split` makes the list ["quiet", ...]: the name of the step, and the axes that captions and tables leave out.
        "quiet attention_label attention_peer strategy_peer global_batch world_size bucket_mb vocab_size".split(),
        ["fields", COMPILED],  # adds `way` and `how`: how blocks are compiled, in file names and in headings
        ["styled", "attention"],
        ["styled", "row", "strategy", "row"],
        [
            "ordered",
            "section",
            "size",
            "context",
            "batch",
            "num_ranks",
            "train_tokens",
            "val_tokens",
            "epochs",
            "precision",
            "compile",
            "attention",
            "row",
        ],
    ],
    "chapters": [
        {
            "title": "Training: {section}",
            "blocks": [
                {
                    "of": [
                        [
                            "cut",
                            "training-{section}-{size}-S{context}B{batch}-{precision}{way}-W{num_ranks}-T{train_tokens}x{epochs}",
                            "{size}, context {context}, batch {batch} of each of {num_ranks} ranks, {precision}{how}",
                        ],
                        ["greatest", "budget", "curve_budget"],  # adds `budget`: the greatest `curve_budget`
                        # From here on {base} is the baseline strategy, and `beside` the case that trains with it.
                        ["beside_baseline", "strategy", SAME],
                        [
                            "fields",
                            [
                                {
                                    "name": "right",
                                    "role": "detail",
                                    "of": 'f" (right: {budget:g} or less)" if budget else ""',
                                },
                                {
                                    "name": "speedup",
                                    "label": "Speed-up over {base}",
                                    "role": "detail",
                                    "about": "Median time of an epoch by the strategy {base} over that of the row",
                                    "shown": "×",
                                    "of": 'beside["time_s"] / time_s',
                                },
                            ],
                        ],
                        # From here on {base} is "none", and `beside` the training in one process.
                        ["beside_baseline", "strategy", SAME, "none"],
                        [
                            "fields",
                            [
                                {
                                    "name": "efficiency",
                                    "label": "scaling",
                                    "role": "detail",
                                    "about": "Tokens/s of a rank over those of {base}",
                                    "shown": "%",
                                    # The one process takes the batches of all ranks, world_size times those of a rank.
                                    "of": 'beside["time_s"] / time_s / world_size',
                                },
                                {
                                    "name": "ended",
                                    "label": "Loss",
                                    "role": "detail",
                                    # An expression over the fields of a case; texts inside it have quotes of their own.
                                    "of": '("" if valid_loss is None else f"{valid_loss:.4f}")'
                                    ' + f" ({curve_difference:.1e})"',
                                },
                            ],
                        ],
                    ],
                    "lead": [
                        ["pivot", ["tokens_per_s"], ["attention"], "row", {"word": "rate"}],
                        ["bars", ["tokens_per_s"], "row", "attention", "rate"],
                        ["pivot", ["speedup"], ["attention"], "row", {"word": "speedup"}],
                        # "chain" ends the plot's file name; the dotted line at 1.0 has no words.
                        ["lines", ["speedup"], "row", "attention", "chain", {"ceilings": {"speedup": ["", 1.0]}}],
                        [
                            ["fields", [{"name": "plain", "role": "detail", "of": 'without(row, "-reproducible")'}]],
                            # Adds `plain_case`: the case whose `row` is this case's `plain`.
                            ["matched", "plain_case", "row", "plain", SAME],
                            ["only", 'ends(row, "-reproducible")'],
                            [
                                "fields",
                                [
                                    {
                                        "name": "cost",
                                        "label": "Cost of the same bits",
                                        "role": "detail",
                                        "about": "Median time of an epoch over that of the same row without"
                                        " --reproducible",
                                        "shown": "×",
                                        "of": 'time_s / plain_case["time_s"]',
                                    }
                                ],
                            ],
                            # "data" names fields that the table's CSV file holds.
                            ["pivot", ["cost"], ["attention"], "row", {"word": "cost", "data": ["weights"]}],
                        ],
                        [
                            "pivot",
                            ["ended"],
                            ["attention"],
                            "row",
                            {
                                "word": "loss",
                                # {right} is the field that a step of this block's "of" has added; 100 is CURVE_STEPS
                                # of `lmsys.testing`.
                                "about": "Loss after the last epoch on {val_tokens} held-out tokens, nats; in brackets"
                                " how far the loss of a step was at most from that of naive attention in one process,"
                                " over the first 100 steps{right}",
                                "data": ["valid_loss", "loss", "curve_difference", "norm_difference"],
                            },
                        ],
                        [
                            # Replaces each case by one case for each point of its curve, at (`step`, `height`).
                            ["points", "step", "height", "curve_losses", "curve_steps"],
                            [
                                "fields",
                                [
                                    {"name": "step"},
                                    {
                                        "name": "curve_losses",
                                        "unit": "nats",
                                        "label": "Loss by step",
                                        "about": "The loss over the global batch by step, with one attention",
                                        # A height is None where the loss was not finite; it becomes 0, for which no
                                        # point is drawn.
                                        "of": "abs(height or 0)",
                                    },
                                ],
                            ],
                            ["one_of_each", ["row", "step"]],
                            ["lines", ["curve_losses"], "step", "row", "curves"],  # "curves" ends the file name
                        ],
                        [
                            ["points", "step", "height", "curve_differences", "curve_steps"],
                            [
                                "fields",
                                [
                                    {"name": "step"},
                                    {
                                        "name": "curve_differences",
                                        "unit": "nats",
                                        "label": "Loss beside the reference",
                                        "about": "How far the loss of a step is from that of naive attention in one"
                                        " process, for each strategy with the attention row that is farthest; where"
                                        " there is no point it is equal",
                                        # Differences have a sign, and are None where the loss was not finite.
                                        "of": "abs(height or 0)",
                                    },
                                ],
                            ],
                            ["one_of_each", ["row", "step"], "curve_differences"],
                            [
                                "lines",
                                ["curve_differences"],
                                "step",
                                "row",
                                "differences",
                                {"ceilings": {"curve_differences": ["allowed", "budget"]}},
                            ],
                        ],
                    ],
                    "more": [
                        ["pivot", ["mean_s"], ["attention"], "row", {"word": "time"}],
                        ["bars", ["mean_s"], "row", "attention", "time"],
                        ["pivot", ["peak_bytes"], ["attention"], "row", {"word": "memory"}],
                        ["bars", ["peak_bytes"], "row", "attention", "memory"],
                        [
                            "listing",
                            ["attention", "row"],
                            ["mean_s", "speedup", "efficiency", "*", "-time_s"],  # "*": all other metrics but time_s
                            "runs",
                            "Every run",
                        ],
                    ],
                }
            ],
        }
    ],
}
