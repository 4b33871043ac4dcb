"""Small parts that every other folder may use and that use none of them: environment variables, errors, the cache's
folder, Triton or its stand-in, the border of Dynamo's graphs, random rounding."""
