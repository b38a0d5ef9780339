"""Closed forms: what a run holds in memory, from shapes alone, in microseconds and without torch.

Read `story` first: a step is told as moments, whose named lines become the ledger's. `step` tells them, of a rank
(`rank`) that has a stage of the model (`stage`, `pipeline`, `cut`), micro-batches in flight (`in_flight`), states
(`states`), working weights (FSDP2 and fp8: `working_weights`) and gradients (`gradients`). One layer is `layer`: what
it saves (`saved`), its moments (`layer_moments`), in tiles (`tiles`), and what it keeps where it is recomputed
(`keeping`). `training` is the door: `peaks` for a search, `training_ledger` for people. `serving` is a server, `gpt`
the layer of the papers.
"""
