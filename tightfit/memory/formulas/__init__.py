"""Closed forms: the bytes that a run holds in memory, from shapes alone, in microseconds and without torch.

Read `story` first: a step is a list of moments, whose fields become the ledger's lines. `step` computes the moments of
a rank (`rank`: its stage of the model (`stage`, `pipeline`, `cut`), states (`states`), loss and teacher), of other
micro-batches in flight (`in_flight`), working weights (FSDP2 and fp8: `working_weights`) and gradients (`gradients`).
One layer is `layer`: its saved tensors (`saved`), its moments (`layer_moments`), both in tiles, and the level that it
keeps if recomputed (`keeping`). Callers use `training`: `peaks` for a search, `training_ledger` for people. `serving`
is a server, `gpt` the layer of the papers.
"""
