"""Captured steps: the choice of sizes, the layout of inputs, the capture as CUDA graphs, and the replay."""
