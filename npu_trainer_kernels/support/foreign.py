CACHES = ("cache", "past_key_values", "cache_params")
