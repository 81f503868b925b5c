"""The engine process and its loop over scheduler and executor."""
