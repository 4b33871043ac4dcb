"""The ops, as functions of tensors. See each one's docstring for formula, shapes, dtypes and errors."""
