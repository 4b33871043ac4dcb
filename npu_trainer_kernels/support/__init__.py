"""Helpers for the whole package: the import of Triton, marks for `torch.compile`, environment switches, small tools."""
