"""Changes to a trainer while it trains: planned gradients, the arrangement of rows, filtered losses."""
