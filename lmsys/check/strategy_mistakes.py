"""Explains wrong weights after a training on ranks: the known mistake that leads to them, computed in float64.

`strategy.py` calls `explain`. It trains for 0, 1, 2, ... steps until the weights are wrong. Before the first wrong step
the weights are right, so each rank's gradients in that step are known, and so are the weights that each mistake would
lead to, parameter by parameter. Mistakes of a strategy are listed in MISTAKES and `rules`, those of a sharded optimizer
in `optimizer_rules`: add a mistake there. `_sentence` acts on some words in the texts of mistakes; its docstring names
them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from lmsys.check.trained import Before, Result, State, StepGradients, over_ranks, plain, ratio, wrong_parameters
from lmsys.extremes.strategy import OPTIMIZERS, Trial
from lmsys.values import sentences_of

Ask = Callable[[Trial], Sequence[Result]]  # trains on the ranks; the results by rank
# A rule is (a mistake in words, the weights after a step with that mistake, by parameter). In the words `_sentence`
# replaces {gradients} and {names}. Weights are (world_size, ...), or have the parameter's shape: then all ranks have
# them. A parameter that is not in the rule cannot have the mistake.
Rule = tuple[str, State]


NOT_SHARED = "no broadcast or all-gather brings the updated weights to all ranks"
EARLY = "are synchronized too early, before both uses of the weight have added their parts"
TWICE = "are synchronized twice, once after each use of the weight"
# Each mistake is (condition, words, gradient):
# - condition: when the mistake can be made, as `StepGradients.holds` knows it; "" always holds;
# - words: what happens to the gradients; `rules` puts {gradients} before them, as in "gradients are counted twice";
# - gradient: a function that returns the gradient by which ranks step, (1, ...) if it is the same on all ranks, else
#   (world_size, ...).
# If two mistakes give equal results, the first is named.
MISTAKES: tuple[tuple[str, str, Callable[[StepGradients], torch.Tensor]], ...] = (
    ("", "are never synchronized: each rank steps by its own gradients", lambda s: s.local),
    (
        "unused",
        "are divided by the number of ranks that use the parameter; the contract divides by world_size",
        lambda s: s.mean * len(s.used) / s.used.sum(),
    ),
    ("unused", "are lost on the ranks that do not use the parameter", lambda s: s.mean * s.used),
    (
        "unused",
        "are divided by the number of ranks that use the parameter, and lost on the other ranks",
        lambda s: s.mean * len(s.used) / s.used.sum() * s.used,
    ),
    ("", "are summed over ranks, not averaged", lambda s: len(s.used) * s.mean),
    ("", "are divided by the number of ranks twice", lambda s: s.mean / len(s.used)),
    (
        "uneven",
        "are weighted by the number of tokens of each rank; the contract is the plain mean over ranks",
        lambda s: over_ranks(s.local * s.sizes / s.sizes.mean()),
    ),
    (
        "uneven",
        "are weighted by tokens / (tokens of the largest batch); the contract is the plain mean over ranks",
        lambda s: over_ranks(s.local * s.sizes / s.sizes.max()),
    ),
    ("micro", "come from the last micro-batch alone", lambda s: over_ranks(s.grads[:, -1])),
    ("micro", "come from the first micro-batch alone", lambda s: over_ranks(s.grads[:, 0])),
    (
        "micro",
        "are synchronized for the last micro-batch only: gradients made under no_sync() stay local",
        lambda s: s.local - s.grads[:, -1] + over_ranks(s.grads[:, -1]),
    ),
    (
        "micro",
        "are synchronized after the first micro-batch only: later gradients stay local",
        lambda s: s.local - s.grads[:, 0] + over_ranks(s.grads[:, 0]),
    ),
    (
        "micro",
        "are synchronized under no_sync(), but not after the last micro-batch, whose gradients stay local",
        lambda s: s.mean - over_ranks(s.grads[:, -1]) + s.grads[:, -1],
    ),
    (
        "micro",
        "are summed over ranks after each micro-batch: earlier gradients, summed already, are summed again",
        lambda s: s.resummed(len(s.used)) / len(s.used),
    ),
    (
        "micro",
        "are all-reduced after each micro-batch, so earlier ones are summed again;"
        " and never divided by the number of ranks",
        lambda s: s.resummed(len(s.used)),
    ),
    (
        "micro",
        "are divided by the number of ranks after each micro-batch: earlier gradients are divided again",
        lambda s: s.resummed(1 / len(s.used)) / len(s.used),
    ),
    (
        "micro",
        "are multiplied by the number of micro-batches: .grad holds their sum already",
        lambda s: s.grads.shape[1] * s.mean,
    ),
    (
        "micro",
        "are divided by the number of micro-batches; the caller's loss is divided already",
        lambda s: s.mean / s.grads.shape[1],
    ),
    (
        "twice",
        f"{EARLY}: the second part stays on its rank",
        lambda s: s.local - s.early + over_ranks(s.early),
    ),
    ("twice", f"{EARLY}: the second part is lost", lambda s: over_ranks(s.early)),
    (
        "twice",
        "come from one use of the weight alone: the parts of both uses must be added",
        lambda s: s.mean - over_ranks(s.early),
    ),
    (
        "twice",
        f"{TWICE}: the part made first is multiplied by the number of ranks",
        lambda s: s.mean + (len(s.used) - 1) * over_ranks(s.early),
    ),
    (
        "twice",
        f"{TWICE}: the part made second is multiplied by the number of ranks",
        lambda s: len(s.used) * s.mean - (len(s.used) - 1) * over_ranks(s.early),
    ),
    (
        "",
        "are not used: the weights stay as they are; a strategy with parameters of its own, such as shards, needs"
        " make_optimizer() and full_state_dict()",
        lambda s: torch.zeros_like(s.mean),
    ),
    ("", "are counted twice", lambda s: 2 * s.mean),
    ("", "are divided by 2, not by the number of ranks", lambda s: s.local.sum(dim=0, keepdim=True) / 2),
    ("", "are multiplied by the number of ranks twice", lambda s: len(s.used) ** 2 * s.mean),
    ("", "have the wrong sign: weights move along the gradient, not against it", lambda s: -s.mean),
)


def rules(steps: Sequence[Before]) -> Iterable[Rule]:
    """A rule for each known mistake of a strategy.

    steps  the right training before each step, up to the first wrong one; a rule's weights are those after that step
    """
    before = steps[-1]
    for condition, words, gradient in MISTAKES:
        grads = {name: gradient(s) for name, s in before.grads.items() if s.holds(condition)}
        yield "{gradients} " + words, _stepped(before, grads)
    yield (
        "{gradients} contain gradient + weight: the flat buffer held weights and was not zeroed first",
        _stepped(before, {name: s.mean + before.weights[name] for name, s in before.grads.items()}),
    )
    for rank in range(before.trial.world_size):
        yield (
            f"{{gradients}} come from rank {rank} alone on every rank: they are not averaged",
            _stepped(before, {name: s.local[rank : rank + 1] for name, s in before.grads.items()}),
        )
    for dtype in (torch.bfloat16, torch.float16):
        # Three ways: the sum is computed in this dtype; only what is sent is rounded to it; only the result is.
        words = f"{{gradients}} are communicated in {str(dtype).removeprefix('torch.')}"
        sent = {name: s.local.to(dtype) for name, s in before.grads.items()}
        yield words, _stepped(before, {name: x.sum(dim=0, keepdim=True) / len(x) for name, x in sent.items()})
        yield words, _stepped(before, {name: over_ranks(x.to(before.weights[name])) for name, x in sent.items()})
        yield words, _stepped(before, {name: s.mean.to(dtype) for name, s in before.grads.items()})


def _stepped(before: Before, grads: Mapping[str, torch.Tensor]) -> State:
    """The weights (world_size, ...) after a step by these gradients, which are (world_size, ...) or (1, ...) each."""
    weights, ranks = before.weights, range(before.trial.world_size)
    after = [before.after({name: g[rank % len(g)].to(weights[name]) for name, g in grads.items()}) for rank in ranks]
    return {name: torch.stack([of_rank[name] for of_rank in after]) for name in grads}


# A schedule changes lr and momentum. A mistaken optimizer ignores the changes of the options in one of these tuples.
CHANGED = ("lr", "momentum"), ("lr",), ("momentum",)


def optimizer_rules(steps: Sequence[Before]) -> Iterable[Rule]:
    """A rule for each known mistake of a sharded optimizer. `steps` is as in `rules`."""
    last, is_first, trial = steps[-1], len(steps) == 1, steps[-1].trial
    means, world_size, options_given = last.means, trial.world_size, OPTIMIZERS[trial.optimizer]
    known = [
        ("no rank updates {names}", last.weights),
        *(
            (
                f"changes of {' and '.join(names)} in param_groups are not used",
                last.after(means, {name: options_given[name] for name in names}),
            )
            for names in (CHANGED if trial.schedule and not is_first else ())
        ),
        (
            "the optimizer sums gradients over ranks again; they are averaged already",
            last.after({name: world_size * x for name, x in means.items()}),
        ),
        (
            "the optimizer divides gradients by the number of ranks; they are averaged already",
            last.after({name: x / world_size for name, x in means.items()}),
        ),
        (
            "a group's own options are ignored: the first group's options are used",
            last.after(means, last.optimizer.param_groups[0]),
        ),
        (
            "a group's own options are ignored: the constructor's defaults are used",
            last.after(means, last.optimizer.defaults),
        ),
        (
            "the options of the constructor are ignored: torch's defaults are used",
            last.after(means, getattr(torch.optim, trial.optimizer)([torch.zeros(1)]).defaults),
        ),
    ]
    if not is_first:
        earlier_means = steps[-2].means
        known += [
            ("the optimizer's state is lost between steps", last.after(means, afresh=True)),
            (
                "zero_grad() leaves gradients of parameters that other ranks own, and the next step's are added to"
                " them",
                last.after(
                    {name: x + earlier_means[name] * (world_size - 1) / world_size for name, x in means.items()}
                ),
            ),
            (
                "zero_grad() leaves gradients, and the next step's are added to them",
                last.after({name: x + earlier_means[name] for name, x in means.items()}),
            ),
        ]
    return known + [("the update is applied twice", last.after(means, times=2))]


def explain(ask: Ask, trial: Trial) -> str | None:
    """The known mistake that explains the wrong result of a trial, in words; None if there is none.

    ask  runs shorter trials on the ranks, to find the first step that is wrong
    """
    exact, ordinary = plain(trial, torch.float64), plain(trial, torch.float32)
    for steps in range(trial.steps + 1):
        results = ask(replace(trial, steps=steps))
        if any(result.failure for result in results):
            return None
        wrong = list(wrong_parameters(results, exact[steps].weights, ordinary[steps].weights))
        if wrong and steps == 0:
            return _beginning(trial, wrong, exact[0], results)
        if raced := [call for result in results for call in result.raced]:
            return f"a tensor is written while its {raced[0]} is still running: wait() comes too late"
        if wrong:
            mistake = _step(results, wrong, exact[:steps], ordinary[:steps])
            return mistake and (mistake if steps == 1 else f"{mistake} (from step {steps} on)")
    return None


def _beginning(trial: Trial, wrong: Sequence[str], exact: Before, results: Sequence[Result]) -> str:
    """The mistake, in words, if the tensors `wrong` are wrong even before the first step."""
    if trial.sharded:
        return f"the optimizer's constructor changes weights: {listed(wrong)}"
    names = {  # "scale" is the buffer of a `Probe`
        "initial weights": [name for name in wrong if name in exact.grads],
        "initial weights of frozen parameters": [
            name for name in wrong if name not in exact.grads and name not in trial.twins and name != "scale"
        ],
        "buffers": [name for name in wrong if name == "scale"],
    }
    fault = (
        "are not rank 0's, though equal on all ranks: rounded, or sent by another rank"
        if all(torch.equal(result.state[name], results[0].state[name]) for result in results for name in wrong)
        else "are not broadcast from rank 0"
    )
    return "; ".join(f"{kind} {fault}: {listed(wrong)}" for kind, wrong in names.items() if wrong)


def _step(
    results: Sequence[Result], wrong: Sequence[str], exact: Sequence[Before], ordinary: Sequence[Before]
) -> str | None:
    """The mistakes of the last step of `exact`, in words, for all parameters `wrong`; None if none is known.

    exact, ordinary  the right training up to this step, in float64 and in float32
    """
    trial, trained = exact[-1].trial, list(exact[-1].means)
    unexplained = [name for name in wrong if name not in trial.twins]
    if frozen := [name for name in unexplained if name not in exact[-1].grads]:
        return f"frozen parameters or buffers are changed by training: {listed(frozen)}"
    fitting, sentences = _fitting(results, unexplained, exact, ordinary), list[str]()
    while unexplained:
        rule = max(fitting, key=lambda rule: len(fitting[rule] & set(unexplained)))
        if not (names := [name for name in unexplained if name in fitting[rule]]):
            break
        sentences.append(_sentence(rule, names, trained, trial, results))
        unexplained = [name for name in unexplained if name not in names]
    # `rules` has a rule with "alone on every rank" for each rank. If each of them explains some parameters, then each
    # parameter follows the gradient of one rank, its owner.
    if len(sentences) == trial.world_size and not unexplained and all("alone on every rank" in x for x in sentences):
        return "each parameter is stepped by the gradient of its owner rank alone: gradients are not averaged"
    if sentences:
        return "; ".join(sentences)
    # No mistake is known.
    first, *others = [result.state for result in results]
    apart = [name for name in wrong if not all(torch.equal(first[name], other[name]) for other in others)]
    return f"ranks end with different weights: {listed(apart)}" if apart else None


def _fitting(
    results: Sequence[Result], names: Sequence[str], exact: Sequence[Before], ordinary: Sequence[Before]
) -> dict[str, set[str]]:
    """By mistake, the parameters of `names` whose weights it explains on every rank.

    results          by rank, the wrong results after the last step of `exact`
    exact, ordinary  as in `_step`
    """

    def ranks(name: str, wide: State, narrow: State) -> list[int]:
        """The ranks that end with these weights of the parameter.

        wide    the weights in float64
        narrow  the same in float32; its error is the error that a rank may have
        """
        shape = len(results), *exact[-1].weights[name].shape
        ends = zip(results, wide[name].broadcast_to(shape), narrow[name].broadcast_to(shape), strict=True)
        return [
            rank
            for rank, (result, x, y) in enumerate(ends)
            if x.isfinite().all() and ratio(result.state[name], x, y) <= 1
        ]

    fitting: dict[str, set[str]] = {}
    known = optimizer_rules if exact[-1].trial.sharded else rules
    for (rule, wide), (_, narrow) in zip(known(exact), known(ordinary), strict=True):
        fitting.setdefault(rule, set()).update(
            name for name in names if name in wide and len(ranks(name, wide, narrow)) == len(results)
        )
    before, last = exact[-1], ordinary[-1]
    after = before.after(before.means), last.after(last.means)  # the right weights after the step
    keepers: dict[str, list[str]] = {}  # by the ranks that keep the old weights, in words: the parameters
    for name in names:
        keep, step = ranks(name, before.weights, last.weights), ranks(name, *after)
        if keep and step and len(keep) + len(step) == len(results):
            keepers.setdefault(f"rank {', '.join(map(str, keep))} keeps its old", []).append(name)
    kept = "; ".join(f"{rank} {listed(parameters)}" for rank, parameters in keepers.items())
    fitting[f"{NOT_SHARED}: {kept}"] = {name for parameters in keepers.values() for name in parameters}
    return fitting


def _sentence(rule: str, names: Sequence[str], trained: Sequence[str], trial: Trial, results: Sequence[Result]) -> str:
    """The mistake `rule` as a sentence about the parameters `names`; `trained` are all parameters that are trained.

    What is added to the sentence depends on words in `rule`: "summed", "twice", "never synchronized", and NOT_SHARED.
    Keep them in the tables above.
    """
    are_all, subject = set(names) == set(trained), listed(names)
    if "tied" in trial.parts and names == ["embed.weight"] and ("summed" in rule or "twice" in rule):
        rule, subject = (
            f"{rule}; the weight has two names and is synchronized once for each",
            "the tied weight embed.weight",
        )
    sentence = rule.format(gradients="gradients" if are_all else f"the gradients of {subject}", names=subject)
    waits = [call for result in results for call in result.unwaited]
    never, late = "never synchronized" in rule, NOT_SHARED in rule
    # True if they are the module's first parameters: a backward makes their gradients last.
    is_end = not are_all and set(names) == set(trained[: len(names)])
    return next(
        sentences_of(
            (waits and (never or late), f"{sentence}; the {''.join(waits[:1])} is not waited for"),
            (never and is_end, f"{sentence}; these come last in a backward, as if the last bucket were not sent"),
            (are_all or "{" in rule or late, sentence),  # a sentence with {gradients} or {names} has the subject in it
            (True, f"{sentence} ({subject})"),
        )
    )


def listed(names: Sequence[str]) -> str:
    """The names in a line; if there are more than four, the first three and the number of the others."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
