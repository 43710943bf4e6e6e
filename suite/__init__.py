"""What the scripts share beyond the paper, in the order in which to read it.

task.py      what a script provides: the base class of a task, its flags and figures
trial.py     one trial: the training loop, its checkpoints, the files of its folder
run.py       what a command line does: one trial, or many as processes
verdicts.py  what trials show: statistics, sentences and their verdicts
pictures.py  pictures of figures
fast.py      common.py's numbers, faster
sweeps.py    ... of GRU and LSTM, through time and back
graphs.py    compiled functions, and CUDA graphs: a step in one launch
machine.py   device and engine, and what is recorded of them
"""
