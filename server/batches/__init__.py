"""Files and batches: work without a deadline, stored in `--data-dir` across restarts.

    routes.py      /v1/files and /v1/batches
    schema.py      bodies, queries, the batch object, and the fields that only the server sees
    database.py    SQLite: the owners of files and batches, and the state of each
    files.py       uploaded and written files; their rows come before their bytes, and go after them
    upload.py      stores one upload
    multipart.py   a streaming parser of an upload's body
    store.py       batches and their states
    lines.py       the input: one request a line
    results.py     output and error file, which also record what is done after a crash
    background.py  the application, engine client and metrics that lines use
    run.py         runs one batch from `validating` to its end
    runner.py      chooses the batches to run, in one of the processes that share the directory

Everything that blocks runs in threads.  The clock is an argument, in Unix seconds.
"""
