"""Cross-entropy losses: their cases, each compared with float64. `loss_mistakes.py` has the formula and the mistakes.

`kinds.py` calls `questions`, and the benchmark of losses calls `faults_of_options`. A loss is `f(logits, targets)`, or
with the language model's head in it `f(hidden, weight, targets)` (the weight may come first). It may take an
`ignore_index`, and the options in `loss_mistakes.OPTIONS`: it is asked only about those for which it has a parameter.
A module's class is constructed without arguments. The loss is the mean over all tokens that are not ignored.

Add a case to CASES, and to ROLES a name that a parameter may have. A new option of losses is a name in
`loss_mistakes.OPTIONS`, a role in ROLES and a line of OPTION_CASES. A case's shape is that of the logits, (N, V). Its
setting "ignored" is how many tokens, from the first on, are ignored; its other settings are arguments of the loss.

Legend: N tokens, V vocabulary, M d_model, WIDTH in all cases. KINDS are kinds of extreme inputs.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch

from lmsys import config, draws, registry, signature
from lmsys.check import formulas, loss_mistakes, question
from lmsys.extremes.loss import KINDS, WIDTH, write_head, write_kind

ROLES: signature.Roles = {
    "hidden": ("hidden", "input", "inputs", "x", "h", "hidden_states"),
    "logits": ("logits", "predictions", "pred", "preds", "scores"),
    "weight": ("weight", "w", "linear_weight", "lin_weight", "head"),
    "targets": ("targets", "target", "labels", "label", "y"),
    "ignore_index": ("ignore_index", "ignored", "ignore"),
    "reduction": ("reduction",),
    "token_weights": ("token_weights", "loss_weights", "sample_weight"),
    "label_smoothing": ("label_smoothing", "smoothing"),
    "z_loss": ("z_loss", "lse_square_scale", "z_loss_weight", "z_loss_multiplier"),
    "softcap": ("softcap", "logit_softcap", "logits_soft_cap", "final_logit_softcapping"),
}
# The roles of a loss without a weight. Its tensor is the logits, even if the parameter has a usual name of hidden
# states, such as `x`.
OF_LOGITS = {"logits": (*ROLES["logits"], *ROLES["hidden"])} | {
    role: names for role, names in ROLES.items() if role not in ("logits", "hidden", "weight")
}
UPSTREAM = 0.625  # grad_output of a loss that is one number: exact in every dtype, and not 1, so that ignoring it shows
TOKENS, ODD = 24, (101, 517)  # a few tokens; tokens and vocabulary, neither of them a multiple of a tile
LONG = 330, 517  # more tokens than a chunk of most kernels
OPTION_CASES = tuple(  # two cases for each option, the second with ignored tokens; the option's value is in `more`
    formulas.Case(about + words, shape, more={**option, **ignored})
    for words, ignored in (("", {}), (", and ignored tokens", {"ignored": 33, "ignore_index": config.IGNORED}))
    for about, shape, option in (
        ("the sum of losses", LONG, {"reduction": "sum"}),
        ("the losses of tokens", LONG, {"reduction": "none"}),
        ("weights of tokens", ODD, {"token_weights": "drawn"}),
        ("smoothed labels", ODD, {"label_smoothing": 0.1}),
        ("a z-loss", ODD, {"z_loss": 0.01}),
        ("a soft cap", ODD, {"softcap": 1.5}),
    )
)
CASES = (
    (
        formulas.Case("a few tokens", (TOKENS, 96)),
        formulas.Case("an odd vocabulary size", ODD),
        formulas.Case("more tokens than a chunk", LONG),
        formulas.Case("a large vocabulary", (TOKENS, 5003)),
        formulas.Case("parts of wider rows", ODD, more={"spare columns": 3}),
        formulas.Case("a second backward of a retained graph", ODD, more={"retained": True}),
        formulas.Case("ignored tokens", LONG, more={"ignored": 101, "ignore_index": config.IGNORED}),
        formulas.Case("another ignore_index", ODD, more={"ignored": 33, "ignore_index": 7}),
    )
    + OPTION_CASES
    + formulas.cases_in(formulas.NARROW, ["an odd vocabulary size"], ODD)
    + formulas.cases_in(formulas.NARROW[:1], ["a second backward of a retained graph"], ODD, more={"retained": True})
    + formulas.cases_in(formulas.DTYPES[:2], KINDS, ODD, extreme=True)  # float32 and bfloat16
    + (formulas.Case("all tokens ignored", (TOKENS, 96), more={"ignored": TOKENS, "ignore_index": config.IGNORED}),)
)


def questions(
    entry: registry.Entry, options: question.Options, cases: Iterable[formulas.Case] = CASES
) -> Iterator[question.Question]:
    """A question for each case. A case with an option for which the loss has no parameter is not asked."""
    implementation = entry.load()
    call = signature.called(
        signature.built(implementation, {}, {}) if signature.is_module(implementation) else implementation,
        roles_of(implementation),
    )
    return formulas.questions_of(
        cases,
        partial(_fault_of, call, options),
        options,
        lacking=[name for name in ("ignore_index", *loss_mistakes.OPTIONS) if not call.has(name)],
    )


def faults_of_options(entry: registry.Entry) -> dict[str, float]:
    """{case in words: error over its budget} of the cases in which a loss is wrong, for the benchmark of losses.

    The value is inf if there is no such number, as when the loss raises an exception. A function from a file is asked
    all cases in float32 except that of a second backward, which no training does. A row of a table is asked only the
    cases of options for which it has a parameter.
    """
    cases = [case for case in CASES if "retained" not in case.more] if ".py:" in entry.target else OPTION_CASES
    chosen = questions(entry, question.Options(dtypes=("float32",)), cases)
    return {x.about: fault.error_ratio or math.inf for x in chosen if x.reason is None and (fault := x.judge())}


def roles_of(implementation: object) -> signature.Roles:
    """ROLES as they apply to this implementation: OF_LOGITS if it needs no weight.

    An autograd Function is not asked for options, since it takes no keywords.
    """
    needed = signature.names_of(
        name for name, x in signature.parameters_of(implementation).items() if x.default is x.empty
    )
    roles = OF_LOGITS if needed.isdisjoint(ROLES["weight"]) else ROLES
    left_out = loss_mistakes.OPTIONS if signature.is_function(implementation) else ()
    return {role: names for role, names in roles.items() if role not in left_out}


def _problem(call: signature.Called, case: formulas.Case, options: question.Options) -> formulas.Problem:
    """The inputs of a case: hidden states and the head's weight if the loss takes a weight, else the logits."""
    tokens, vocabulary = case.shape
    ignored, ignore_index = (
        case.more.get(name, usual) for name, usual in (("ignored", 0), ("ignore_index", config.IGNORED))
    )
    hidden = formulas.drawn(options, "hidden", tokens, WIDTH)
    weight = formulas.drawn(options, "weight", vocabulary, WIDTH) * WIDTH**-0.5
    # The last class is no target: `write_head` gives it the highest logit.
    targets = draws.whole_numbers(draws.key(options.seed, "targets"), first=0, count=tokens, below=vocabulary - 1)
    if case.extreme:
        write_head(weight, targets)
        write_kind(KINDS[case.about], hidden)
    targets[:ignored] = ignore_index
    logits = hidden.to(case.dtype).double() @ weight.to(case.dtype).double().mT
    inputs = {"hidden": hidden, "weight": weight} if call.has("weight") else {"logits": logits}
    settings = {
        "targets": targets,
        "ignore_index": ignore_index,
        **{name: value for name, value in case.more.items() if name in loss_mistakes.OPTIONS},
    }
    if "token_weights" in settings:
        settings["token_weights"] = formulas.drawn(options, "token_weights", tokens).abs()
    return formulas.Problem.of(
        case,
        options,
        inputs,
        settings,
        grad_output=formulas.drawn(options, "upstream", tokens)
        if settings.get("reduction") == "none"
        else torch.tensor(UPSTREAM),
    )


def _fault_of(call: signature.Called, options: question.Options, case: formulas.Case) -> question.Fault | None:
    """The fault of the loss in a case, or None."""
    problem = _problem(call, case, options)
    return (
        _no_token_counts(call, problem)
        if case.more.get("ignored") == len(problem.settings["targets"])
        else formulas.judge(
            call, loss_mistakes.right, loss_mistakes.mistakes, problem, widened=True, plain_formula=loss_mistakes.plain
        )
    )


def _no_token_counts(call: signature.Called, problem: formulas.Problem) -> question.Fault | None:
    """The fault of a loss for which all tokens are ignored; None if it is right.

    The mean over no tokens is NaN in torch and 0 elsewhere, and both are right. Gradients must be 0.
    """
    try:
        outputs = formulas.run(call, problem)
    except Exception as error:
        return question.Fault(
            f"  it raises {type(error).__name__} where no token counts: {registry.message_of(error).splitlines()[0]}"
        )
    loss = outputs.pop(formulas.RESULT).item()
    if loss != 0 and not math.isnan(loss):
        return question.Fault(f"  the loss is {loss:.6g} where no token counts; expected NaN, as torch has it, or 0")
    for name, x in outputs.items():
        if x.count_nonzero():
            return question.Fault.explained(
                f"  the gradient of {name} is not 0 where no token counts: {x.flatten()[0].item():.6g}, ...",
                "gradients are divided by the number of tokens that count, which is 0",
                error_ratio=None,
            )
    return None
