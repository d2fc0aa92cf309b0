"""Adapters (LoRA): their files, and the places in a model that they change."""
