"""Common parts of the benchmarks: jobs of ranks, emulated nodes, sizes of models, trainings, result files, tables.

`results` keeps what `jobs` of ranks on `nodes` have measured of the trainings in `engines` and `lora`, with models of
`sizes`, by `measuring`; `environment` says on what. Nothing here asks a question of its own.
"""
