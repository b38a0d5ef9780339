"""Rules: what goes with what, in one place and without torch. Each refuses with one sentence that names the fix.

| rules | asked about | asked by |
|---|---|---|
| `LEVER_RULES`, `LAYOUT_RULES` | one section by itself | its own validation, search |
| `RUN_RULES` | layout, levers, precision and the model's shape together | job, search, exports, trainer |
| `DEEPSPEED_RULES` | what DeepSpeed does of a job | job, exports |

A rule is a function that returns its sentence, or None where it has nothing against a run; `concerns` names the fields
it reads. What is not known yet (the shape of a model, the length of its rows) is left out of a `Run`, and rules about
it say nothing. Every lever and every split has a file with all it does not go with: a new one adds its file to the
imports below. What a lever shares with others (it computes layers again, it has products of its own) stands in its row
of jobs/lever_table.py, and rules about that name no lever.
"""

# In the order in which they are asked: how a model is split, then what is saved on each rank.
# isort: off
from tightfit.jobs.rules import data as data
from tightfit.jobs.rules import context as context
from tightfit.jobs.rules import tensor as tensor
from tightfit.jobs.rules import tensor_mesh as tensor_mesh
from tightfit.jobs.rules import expert as expert
from tightfit.jobs.rules import pipeline as pipeline
from tightfit.jobs.rules import deepspeed as deepspeed
from tightfit.jobs.rules import checkpointing as checkpointing
from tightfit.jobs.rules import tiles as tiles
from tightfit.jobs.rules import loss as loss
from tightfit.jobs.rules import fp8 as fp8
from tightfit.jobs.rules import offload as offload
from tightfit.jobs.rules import optimizer_states as optimizer_states
from tightfit.jobs.rules import update_in_backward as update_in_backward
from tightfit.jobs.rules import distillation as distillation
from tightfit.jobs.rules import quantize as quantize
