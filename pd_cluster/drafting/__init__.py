"""What may follow a sequence, and how much of that a step should verify. Pure policy over ids: no torch, no sockets.

A draft changes no answer: a step accepts it only if the draw of its own place gives it.
"""
