"""What the scripts share beyond the paper. Begin with task.py, then trial.py and run.py."""
