"""Files and batches: work that may wait, kept in one directory (`--data-dir`) across restarts.

    database.py    SQLite: who owns what, and the state of each batch
    files.py       uploaded and written files; their rows come before their bytes, and go after them
    multipart.py   an upload's body, piece by piece
    objects.py     what a batch is to callers, and what they do not see of it
    store.py       batches and what may become of them
    lines.py       the input: one request a line
    results.py     output and error file: what is in them is done, whatever else was lost
    background.py  the application, the engine and the metrics as a batch's lines see them
    run.py         one batch from `validating` to its end
    runner.py      which batches run; exactly one process of those that share the directory

Everything that blocks runs in threads.  The clock is an argument, in Unix seconds.
"""
