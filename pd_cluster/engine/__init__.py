"""The engine process: the step loop, and what ties it to the worker, the connector and the API process."""
