"""Independent helpers for the whole package, which know nothing of ops and models.

The folder has no face: others import each file by itself, because most files need nothing but Python or torch, and
`triton`, `configs` and `optional` are about what may be missing.
"""
