"""Finds tests that depend on how fast the machine is.

- `elapsed`: an assertion about wall or CPU time. Times are claims of benchmarks.
- `deadline`: less than 60 s for what must come. A deadline only guards against a hang.
- `sleep`: a pause in place of an event.
- `unsettled`: a counter, log or file of another process, read without waiting for the event.
- `shared`: numbers of threads or files of the process, where other tests leave some.
- `port`: one that the OS chose for a socket which is closed before another program takes it.

Tests marked `slow` or `gpu`, and files that only such tests use, are left out. `excused.toml` has the places that stay.
"""
