"""Files and batches: work without a deadline, stored in `--data-dir` across restarts.

Everything that blocks runs in threads.  The clock is an argument, in Unix seconds.
"""
