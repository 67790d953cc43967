"""Kernels beside each other on one GPU: who takes part, how they are timed, what the machine allows."""
