"""Thin subclasses of trainers. They add the kernels and copy nothing."""
