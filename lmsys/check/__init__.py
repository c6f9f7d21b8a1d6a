"""`lmsys check mine.py:f`: is an implementation right, and if not, what is wrong with it?

`__main__.py` reads the command line. `kinds.py` lists the kinds of implementation, such as attention, and asks the
questions of a kind. A kind has a module with a function `questions`, which yields a `Question` (`question.py`) for each
case: its `judge` calls the implementation, compares the results with float64, and names the known mistake that would
give a wrong result. These are the modules of the kinds, with the files that they use in brackets:

attention             `attention.py` (`cases.py`, `extremes.py`, `attention_mistakes.py`)
strategies            `strategy.py` (`trained.py`, `recorder.py`, `strategy_mistakes.py`)
optimizers            `optimizer.py` (`optimizer_runs.py`, `optimizer_formula.py`)
functions of tensors  `loss.py` (`loss_mistakes.py`), `norm.py`, `rotary.py`, `swiglu.py` (all: `formulas.py`)

To add a mistake, add its words and its formula to the tables of its kind, and an exhibit (a published implementation
that makes the mistake) to `tests/museum/`. `laptop.py` runs code that asks for a GPU on a machine without one.
"""
