"""Closed forms: what a run holds in memory, from shapes alone, in microseconds and without torch.

Each file is one noun: `gpt` the classic layer, `layer` ours, `logits` the loss, `params` and `states` what is kept per
weight, `pipeline` who holds which layers, `training` all of it by phase, `serving` weights and cache of a served model.
"""
