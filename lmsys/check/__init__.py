"""`lmsys check mine.py:f`: is an implementation right, and if not, what is wrong with it?

`kinds.py` lists the kinds of implementation. Each kind has a module with a function `questions`, which yields a
`Question` (`question.py`) for each case: inputs, and a judge that compares the answer with float64. Beside it are the
known mistakes, by which a wrong answer is explained: attention `attention.py` (`cases.py`, `extremes.py`,
`attention_mistakes.py`), strategies `strategy.py` (`trained.py`, `recorder.py`, `strategy_mistakes.py`), optimizers
`optimizer.py` (`optimizer_runs.py`, `optimizer_formula.py`), and functions of tensors (`formulas.py`): `loss.py`
(`loss_mistakes.py`), `norm.py`, `rotary.py`, `swiglu.py`. To add a mistake, add its words and its formula to the table
of its kind, and an exhibit that makes it to `tests/museum/`.
"""
