"""Rules: what goes with what, in one place and without torch. Each refuses with one sentence that names the fix.

| rules | asked about | asked by |
|---|---|---|
| `LEVER_RULES`, `LAYOUT_RULES` | one section by itself | its own validation, search |
| `RUN_RULES` | layout, levers, precision and the model's shape together | job, search, exports, trainer |
| `DEEPSPEED_RULES` | what DeepSpeed does of a job | job, exports |

A rule is a function that returns its sentence, or None where it has nothing against a run; `concerns` names the fields
it reads. What is not known yet (the shape of a model, the length of its rows) is left out of a `Run`, and rules about
it say nothing. Every lever and every split has a file here with all it does not go with; the files are read in the
order of their names, and say nothing where another has refused already and their sentence would mislead. What a lever
has in common with others (it computes layers again, it has products of its own) stands in its row of
jobs/lever_table.py, and rules about that name no lever.
"""

from importlib import import_module
from pkgutil import iter_modules

for file in iter_modules(__path__):
    import_module(f"{__name__}.{file.name}")
